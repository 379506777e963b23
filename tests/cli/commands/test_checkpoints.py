"""`kdist checkpoints` on this machine: a run folder by name, by path, and folders that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kdist_trainer.config import Keep
from tests.cli.conftest import Kdist
from tests.trainer.checkpoint.states import make_state, opened, save


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty run folder called `digits` in the working directory's `.kdist`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KDIST_HOME", raising=False)
    root = tmp_path / ".kdist" / "digits"
    (root / "checkpoints").mkdir(parents=True)
    (root / "run.json").write_text(
        json.dumps({"run_id": "r", "invocations": [], "checkpoints": str(root / "checkpoints")})
    )
    return root


def test_a_run_without_checkpoints_says_so(kdist: Kdist, run: Path) -> None:
    shown = kdist("checkpoints", "digits")
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert f"no checkpoints in {run / 'checkpoints'}" in shown.stderr


@pytest.mark.sampled
def test_a_checkpoint_without_a_manifest_cannot_be_used_and_is_an_error(
    kdist: Kdist, run: Path
) -> None:
    (run / "checkpoints" / "step-00000005-e1").mkdir()
    shown = kdist("checkpoints", "verify", ".kdist/digits")
    assert shown.exit_code == 1
    assert "damaged: manifest.json is missing" in shown.stdout
    assert "1 damaged: step-00000005-e1" in shown.stderr
    listed = json.loads(kdist("checkpoints", "-o", "json", str(run / "checkpoints")).stdout)
    assert (listed["kind"], listed["checkpoints"][0]["step"]) == ("CheckpointList", 5)
    assert kdist("checkpoints", "-o", "name", "digits", "--local").stdout == "step-00000005-e1\n"


def test_the_list_says_why_each_checkpoint_is_kept(kdist: Kdist, run: Path) -> None:
    store = opened(run / "checkpoints", keep=Keep(last=1, every=2))
    for step in (2, 3):
        assert save(store, step).ok
    newest, older = kdist("checkpoints", "digits").stdout.splitlines()[1:]
    assert newest.endswith("kept: last")
    assert older.endswith("kept: every")


def test_a_folder_that_is_no_run_is_not_found(kdist: Kdist, run: Path) -> None:
    assert kdist("checkpoints", str(run.parent.parent)).exit_code == 4
    assert kdist("checkpoints", "other", "--local").exit_code == 4


def test_one_run_has_to_be_named(kdist: Kdist, run: Path) -> None:
    assert [
        kdist("checkpoints", *words).exit_code for words in ((), ("a", "b"), ("verify", "a", "b"))
    ] == [2, 2, 2]


def test_top_of_a_run_that_is_not_running_points_to_the_report(kdist: Kdist, run: Path) -> None:
    for words in ((), ("-o", "prom")):
        shown = kdist("top", str(run), *words)
        assert shown.exit_code == 4
        assert "no `kdist run` is running" in shown.stderr
        assert "kdist report" in shown.stderr


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("export", "digits"), "name the file to write"),
        (("export", "digits", "-o", "model.bin"), "write with --out model.bin"),
        (("export", "digits", "--out", "x", "--name", "a"), "--name cannot be combined"),
        (("digits", "--out", "model.bin"), "are options of `kdist checkpoints export`"),
        (
            ("digits", "-o", "model.safetensors"),
            "`model.safetensors` is not one of table, json, yaml, name",
        ),
        (("digits", "--ema"), "are options of `kdist checkpoints export`"),
        (("verify", "digits", "--step", "3"), "are options of `kdist checkpoints export`"),
    ],
)
def test_export_wants_a_file_and_the_others_a_format(
    kdist: Kdist, run: Path, words: tuple[str, ...], printed: str
) -> None:
    shown = kdist("checkpoints", *words)
    assert (shown.exit_code, run.is_dir()) == (2, True)
    assert printed in shown.stderr


@pytest.mark.sampled
@pytest.mark.processes
def test_export_writes_the_weights_of_a_run_of_this_machine(kdist: Kdist, run: Path) -> None:
    refused = kdist("checkpoints", "export", "digits", "--out", "model.safetensors")
    assert refused.exit_code == 1
    assert "there is no checkpoint in" in refused.stderr
    store = opened(run / "checkpoints")
    assert save(store, 4).ok
    store.close()
    shown = kdist("checkpoints", "export", "digits", "--out", "model.safetensors")
    assert shown.exit_code == 0
    assert shown.stdout == "model.safetensors: 6 tensors, 1.0 KiB, of step-00000004-e1\n"
    assert load_file("model.safetensors").keys() == make_state(4)["model"].keys()
