"""Failures as ranks record them and agents read them."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from kdist_trainer.config import Cause, Exit
from kdist_trainer.config.exit_codes import Fault, Rerun
from kdist_trainer.errors import StorageError
from kdist_trainer.ipc import failure
from kdist_trainer.ipc.failure import TRACEBACK_LINES, Failure
from kdist_trainer.processes.liveness import Call, Phase, RankSnapshot


def test_what_a_rank_records_its_agent_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("KDIST_NODE", "node-1")
    monkeypatch.setenv("KDIST_SCRATCH", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    try:
        raise StorageError("the disk is full")
    except StorageError as error:
        failure.record(error, step=7)
    recorded = failure.read(tmp_path, 1)
    assert recorded is not None
    assert recorded.cause == Cause.STORAGE
    assert recorded.code == Exit.STORAGE
    assert recorded.rank == 5
    assert recorded.node == "node-1"
    assert recorded.step == 7
    assert recorded.traceback[-1] == "kdist_trainer.errors.StorageError: the disk is full"
    failure.record(ValueError("a later one"))
    assert failure.read(tmp_path, 1) == recorded, "the first failure of a rank stands"
    assert failure.read(tmp_path, 0) is None


def test_a_failure_survives_its_json_and_anything_else_is_refused() -> None:
    whole = Failure(Cause.HANG, Exit.HANG, True, "é\n", 1, "n", 2, 3, 4.5, ("a", "b"), "all_reduce")
    assert Failure.from_json(whole.to_json()) == whole
    for text in ("", "[]", "{}", '{"cause": "odd", "code": 70}', whole.to_json()[:-9]):
        with pytest.raises(ValueError, match=r"."):
            Failure.from_json(text)


def test_recording_into_a_folder_that_is_gone_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDIST_SCRATCH", str(tmp_path / "gone"))
    failure.record(ValueError("odd"))


def test_a_failure_of_a_rank_holds_its_step_and_the_collective_that_it_is_in() -> None:
    call = Call(17, 17, "all_reduce", "float32", 4, "4", "")
    stopped = RankSnapshot(3, Phase.STEP, 7, 0, call, inside=True, generation=2, pid=1)
    found = Failure.of_rank(
        Cause.HANG,
        Exit.HANG,
        "rank 1 hangs",
        rank=1,
        node="node-1",
        generation=2,
        snapshot=stopped,
        traceback=["line"] * 100,
    )
    assert (found.primary, found.step, found.collective) == (True, 7, str(call))
    assert len(found.traceback) == TRACEBACK_LINES
    before = RankSnapshot(0, Phase.START, -1, 0, call, inside=False, generation=2, pid=1)
    found = Failure.of_rank(
        Cause.HANG, Exit.HANG, "", rank=1, node="node-1", generation=2, snapshot=before
    )
    assert (found.step, found.collective) == (None, None)


def test_what_ended_a_run_for_good_is_run_again_unchanged_only_if_a_machine_failed() -> None:
    gpu = Failure(Cause.DEVICE, Exit.DEVICE, True, "CUDA error: uncorrectable ECC error")
    assert (gpu.fault, gpu.rerun) == (Fault.DEVICE, Rerun.AGAIN)
    assert replace(gpu, code=Exit.BUDGET).rerun is Rerun.AGAIN, "no restart was left"
    own = Failure(Cause.COLLECTIVE_MISMATCH, Exit.USER, True, "rank 1 diverged")
    assert (own.fault, own.rerun) == (Fault.USER, Rerun.FIXED)
    slow = Failure(Cause.PREFLIGHT, Exit.CONFIG, True, "too slow")
    assert slow.rerun is Rerun.FIXED, "the same machines would measure the same"


def test_a_password_in_the_url_of_an_error_is_in_no_failure() -> None:
    try:
        raise ConnectionError("http://me:s3cret@tracker:5000/api refused the request")
    except ConnectionError as error:
        text = failure.describe(error).to_json()
    assert "http://tracker:5000/api" in text
    assert "s3cret" not in text


def test_the_types_of_a_group_of_errors_are_those_of_its_members_too() -> None:
    types = failure.describe(ExceptionGroup("all", [KeyError("a"), TimeoutError("b")])).types
    assert {"builtins.ExceptionGroup", "builtins.LookupError", "builtins.OSError"} <= {*types}
    assert len(types) == len({*types})


class Broken(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        raise ValueError(f"row {index} is bad")

    def __len__(self) -> int:
        return 8


@pytest.mark.processes
def test_an_error_in_a_loader_process_is_told_as_it_was_raised_there() -> None:
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker") as raised:
        list(torch.utils.data.DataLoader(Broken(), num_workers=1))
    assert failure.describe(raised.value).message == "ValueError: row 0 is bad"


def test_an_error_of_the_compiler_is_reported_as_it_was_raised() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/cache/file.py")
    for error in (InductorError(full, None), BackendCompilerFailed(len, full, None)):
        found = failure.describe(error)
        assert found.cause is Cause.STORAGE
        assert found.message.startswith(f"{type(error).__name__}: OSError: [Errno 28] No space")
