"""Weights as safetensors: what foreign readers find in the file, and what is never written."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file
from torch import nn

from kdist_trainer.checkpoint import __main__ as look
from kdist_trainer.checkpoint import export
from kdist_trainer.checkpoint.manifest import DamagedCheckpointError
from kdist_trainer.errors import CheckpointMismatchError
from tests.trainer.checkpoint.states import make_state, opened, position


def write(root: Path, target: Path, **how: Any) -> dict[str, Any]:
    return export.write_file(export.prepare(root, **how), target)


def keep(root: Path, state: dict[str, Any], step: int = 1) -> None:
    """Save `state` as a run of its own that has ended."""
    store = opened(root)
    store.save(state, position(step), step=step, required=True)
    store.close()


def test_another_reader_finds_every_weight_by_its_full_name_bit_for_bit(
    root: Path, tmp_path: Path
) -> None:
    reported = write(root, tmp_path / "model.safetensors")
    found, expected = load_file(tmp_path / "model.safetensors"), make_state(2)["model"]
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert {name: one.dtype for name, one in found.items()} == {
        name: one.dtype for name, one in expected.items()
    }
    assert (reported["step"], reported["tensors"]) == (2, len(expected))
    assert reported["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "kdist.checkpoint": "step-00000002-e1",
            "kdist.step": "2",
        }


def test_a_step_can_be_chosen_and_one_that_is_not_there_is_refused(
    root: Path, tmp_path: Path
) -> None:
    assert write(root, tmp_path / "one", step=1)["checkpoint"] == "step-00000001-e1"
    with pytest.raises(
        CheckpointMismatchError, match=r"no checkpoint of step 7 .* available steps: 2, 1"
    ):
        export.prepare(root, step=7)


def test_a_changed_byte_is_found_before_anything_is_written(root: Path, tmp_path: Path) -> None:
    (file,) = (root / "step-00000002-e1").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"was changed after it was written; --step"):
        write(root, tmp_path / "model.safetensors")
    assert list(tmp_path.glob("model*")) == []


def test_a_file_that_could_not_be_finished_leaves_the_old_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.safetensors"
    target.write_text("old")
    found = export.prepare(root)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "load_full_tensors", fail)
    with pytest.raises(OSError, match="No space"):
        export.write_file(found, target)
    assert [path.name for path in tmp_path.glob("model*")] == [target.name]
    assert target.read_text() == "old"


def test_averages_stand_in_for_their_weights_and_buffers_stay(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model(torch.randn(8, 3))
    averages = {name: weight.detach() + 1 for name, weight in model.named_parameters()}
    keep(tmp_path / "run", {"model": model.state_dict(), "optimizer": {}, "average": averages})
    reported = write(tmp_path / "run", tmp_path / "plain")
    assert reported["averaged"] == 0
    assert torch.equal(load_file(tmp_path / "plain")["0.weight"], model.state_dict()["0.weight"])
    assert write(tmp_path / "run", tmp_path / "average", average=True)["averaged"] == len(averages)
    found = load_file(tmp_path / "average")
    assert torch.equal(found["0.weight"], averages["0.weight"])
    assert torch.equal(found["1.running_mean"], model.state_dict()["1.running_mean"])


def test_a_weight_with_two_names_has_its_average_under_both(tmp_path: Path) -> None:
    model = nn.ModuleDict({"read": nn.Embedding(5, 3), "write": nn.Linear(3, 5, bias=False)})
    model["write"].weight = model["read"].weight
    averages = {name: weight.detach() * 2 for name, weight in model.named_parameters()}
    assert list(averages) == ["read.weight"]
    keep(tmp_path / "run", {"model": model.state_dict(), "optimizer": {}, "average": averages})
    write(tmp_path / "run", tmp_path / "average", average=True)
    found = load_file(tmp_path / "average")
    assert torch.equal(found["write.weight"], averages["read.weight"])


def test_averages_that_were_not_kept_are_not_made_up(root: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="without emaDecay"):
        export.prepare(root, average=True)


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    keep(tmp_path / "run", {"net": {"weight": torch.ones(2)}})
    with pytest.raises(CheckpointMismatchError, match="no weights under the name `model`"):
        export.prepare(tmp_path / "run")


def test_the_weights_come_in_several_reads_as_in_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written() -> bytes:
        stream = io.BytesIO()
        export.prepare(root).write(stream)
        return stream.getvalue()

    whole = written()
    monkeypatch.setattr(export, "_AT_ONCE_BYTES", 1)
    assert written() == whole
    assert load(whole).keys() == make_state(2)["model"].keys()


def test_the_command_sends_the_file_to_stdout_and_its_digest_to_stderr(
    root: Path, capfdbinary: Any
) -> None:
    assert look.main(["export", str(root), "--out", "-"]) == 0
    sent = capfdbinary.readouterr()
    assert json.loads(sent.err)["sha256"] == hashlib.sha256(sent.out).hexdigest()
    assert load(sent.out).keys() == make_state(2)["model"].keys()


LOOK = """
import sys
from kdist_trainer.checkpoint import __main__ as look
code = look.main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""


def test_the_command_says_in_one_line_and_without_torch_why_there_is_nothing_to_export(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LOOK, "export", str(tmp_path), "--out", str(tmp_path / "x")]
    reported = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (reported.returncode, reported.stdout, reported.stderr.count("\n")) == (1, "False\n", 1)
    assert "there is no checkpoint in" in reported.stderr


EXPORT = """
import gc, sys
searched = []
gc.callbacks.append(lambda phase, info: searched.append(info["generation"]))
from kdist_trainer.checkpoint import __main__ as look
code = look.main(sys.argv[1:])
print("torch" in sys.modules, gc.isenabled(), 2 in searched)
sys.exit(code)
"""


@pytest.mark.sampled
def test_python_does_not_search_all_objects_for_garbage_while_torch_is_imported(
    root: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", EXPORT, "export", str(root), "--out", str(tmp_path / "x")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "True True False"
