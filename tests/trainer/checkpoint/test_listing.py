"""`python -m kdist_trainer.checkpoint`: what it says about folders whole, damaged, unfinished,
fenced off and absent.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint import writer
from kdist_trainer.checkpoint.__main__ import describe, main, read_ledger
from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger
from kdist_trainer.checkpoint.manifest import CheckpointDirectory, read_raw_manifest
from kdist_trainer.formats.digest import Digest
from tests.trainer.checkpoint.states import load, make_state, open_store, position, save


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main([str(argument) for argument in arguments])
    return code, json.loads(capsys.readouterr().out)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def states(document: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in document["checkpoints"]}


def test_a_sound_folder_is_listed_newest_first_with_what_its_manifests_say(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = asked(capsys, "list", root)
    assert code == 0
    assert states(document) == {"step-00000002-e1": "complete", "step-00000001-e1": "complete"}
    assert (document["latest"], document["resumesFrom"]) == ("step-00000002-e1", "step-00000002-e1")
    newest = document["checkpoints"][0]
    on_disk = sum(
        path.stat().st_size
        for path in (root / newest["name"]).iterdir()
        if path.name != "manifest.json"
    )
    assert newest["step"] == 2
    assert newest["samplesSeen"] == 64
    assert newest["worldSize"] == 1
    assert newest["bytes"] == on_disk
    assert newest["parent"] == "step-00000001-e1"
    assert abs(newest["time"] - document["time"]) < 3600


def test_verify_reads_every_byte_and_names_the_file_that_changed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(capsys, "verify", root)[0] == 0
    victim = max((root / "step-00000002-e1").glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(victim)
    assert states(asked(capsys, "list", root)[1])["step-00000002-e1"] == "complete", (
        "a list reads no contents"
    )
    code, document = asked(capsys, "verify", root)
    assert code == 1
    assert states(document) == {"step-00000002-e1": "damaged", "step-00000001-e1": "verified"}
    assert (
        document["checkpoints"][0]["problem"] == f"{victim.name} was changed after it was written"
    )
    assert document["resumesFrom"] == "step-00000001-e1"


@pytest.mark.parametrize("unsafe", [range(3), Path()], ids=["range", "Path"])
def test_what_no_training_can_read_is_not_called_verified(
    unsafe: object,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(root, generation=2)
    load(store)
    monkeypatch.setattr(writer, "copy_value", lambda value, _: value)  # as it was once
    state = {**make_state(3), "scheduler": (unsafe,)}
    store.loadable.accept(state)
    store.save(state, position(3), step=3)
    store.close()
    code, document = asked(capsys, "verify", root)
    assert code == 1
    assert list(states(document).values()) == ["unreadable", "verified", "verified"]
    problem = document["checkpoints"][0]["problem"]
    assert problem.startswith("scheduler: its content cannot be read"), problem
    assert f"{type(unsafe).__name__}, which is not on the allow-list" in problem
    assert document["resumesFrom"] == "step-00000002-e1"


def test_an_index_that_is_not_on_the_allow_list_is_unreadable(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = root / "step-00000002-e1"
    data = pickle.dumps(Path("a"))
    (folder / ".metadata").write_bytes(data)
    manifest = read_raw_manifest(folder)
    files = {**manifest.files, ".metadata": Digest.of(data)}
    (folder / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())
    document = asked(capsys, "verify", root)[1]
    assert document["checkpoints"][0]["state"] == "unreadable"
    assert "is not on the allow-list" in document["checkpoints"][0]["problem"]


def test_one_checkpoint_can_be_verified_alone(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(next((root / "step-00000002-e1").glob("*.distcp")))
    code, document = asked(capsys, "verify", root, "--name", "step-00000001-e1")
    assert (code, states(document)) == (0, {"step-00000001-e1": "verified"})


def test_what_a_list_says_is_resumed_is_what_a_training_resumes(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "step-00000002-e1" / "manifest.json").unlink()
    assert asked(capsys, "list", root)[1]["resumesFrom"] == "step-00000001-e1"
    assert load(open_store(root, generation=2)) == 1


def test_a_commit_of_a_writer_that_had_lost_the_lock_is_superseded(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aside = root / "step-00000002-e1"
    late = aside.rename(root.parent / aside.name)
    assert load(open_store(root, generation=2)) == 1  # a later group starts from step 1 …
    late.rename(aside)  # … and then the paused writer's rename happens
    assert states(asked(capsys, "list", root)[1])["step-00000002-e1"] == "superseded"


def test_unfinished_saves_and_evidence_are_shown_apart(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "step-00000003-e1.tmp-ab-1").mkdir()
    (root / "step-00000001-e1").rename(root / "step-00000001-e1.damaged")
    found = states(asked(capsys, "list", root)[1])
    assert found == {
        "step-00000002-e1": "complete",
        "step-00000001-e1.damaged": "damaged",
        "step-00000003-e1.tmp-ab-1": "unfinished",
    }


def test_a_folder_that_is_not_there_is_empty_and_stays_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = asked(capsys, "list", tmp_path / "none")
    assert (code, document["exists"], document["checkpoints"], document["resumesFrom"]) == (
        0,
        False,
        [],
        None,
    )
    assert asked(capsys, "ledger", tmp_path / "none") == (0, {"events": [], "steps": []})
    assert not (tmp_path / "none").exists()


def test_the_end_is_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CheckpointDirectory(root).write_done({"step": 2, "outcome": "done"})
    assert asked(capsys, "list", root)[1]["done"] == {"step": 2, "outcome": "done"}


def test_a_folder_put_aside_keeps_everything_and_the_next_run_begins_again(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {path.name for path in root.iterdir()}
    _, first = asked(capsys, "aside", root)
    moved = Path(first["moved"])
    assert {path.name for path in moved.iterdir()} == names
    assert load(open_store(root, run_id="another")) is None
    assert Path(asked(capsys, "aside", root)[1]["moved"]) != moved
    assert asked(capsys, "aside", root) == (0, {"folder": str(root), "moved": None})


def test_a_short_ledger_comes_as_it_is_and_a_long_one_keeps_its_sums(tmp_path: Path) -> None:
    RunLedger(tmp_path).append("generation", generation=1, reason="start")
    steps = StepLedger(tmp_path)
    lines = [
        {
            "step": n,
            "generation": 1 + n // 7000,
            "first": n * 4,
            "last": n * 4 + 3,
            "loss": (1.0).hex(),
            "seconds": 0.5,
        }
        for n in range(1, 10_001)
    ]
    steps.append(lines)
    steps.close()
    assert read_ledger(tmp_path)["steps"] == lines
    merged = read_ledger(tmp_path, most_steps=100)["steps"]
    assert len(merged) < 6000
    assert sum(line["seconds"] for line in merged) == pytest.approx(5000)
    assert merged[-1] == lines[-1]
    assert {line["step"] for line in merged} >= {6999, 7000}, (
        "a record ends where its generation does"
    )
    assert [line["first"] for line in merged[1:]] == [line["last"] + 1 for line in merged[:-1]], (
        "no sample is left out"
    )


def test_it_needs_no_torch(root: Path) -> None:
    program = (
        "import sys; from kdist_trainer.checkpoint.__main__ import main; main(['list', "
        "sys.argv[1]])"
    )
    program += "; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", program, str(root)], stdout=subprocess.DEVNULL, check=False
        ).returncode
        == 0
    )


def test_a_disk_that_does_not_answer_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lock").write_text("a file where a folder belongs")
    assert main(["list", str(tmp_path)]) == 74
    assert "Not a directory" in capsys.readouterr().err


def test_a_save_under_way_does_not_disturb_the_list(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    load(store)
    for step in range(1, 6):
        save(store, step)
        found = describe(tmp_path / "run", verify=True)
        assert found["checkpoints"][0]["step"] == step
        assert all(entry["state"] == "verified" for entry in found["checkpoints"])
