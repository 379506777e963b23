"""Where an error was raised: by real frames, also those of other processes."""

from __future__ import annotations

import errno
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes
from torch.utils.data import DataLoader

import kdist_trainer
from kdist_trainer.causes.search import Origin, frames_of
from kdist_trainer.config import Cause, Exit
from kdist_trainer.config.exit_codes import Fault, Rerun
from kdist_trainer.errors import DeviceFaultError, NodeFaultError, Retry, find
from kdist_trainer.ipc.failure import Failure, describe

OWN = "def call(fail):\n    fail()\n"
PACKAGE = Path(kdist_trainer.__file__).parent


def run(file: Path | str, text: str, name: str, **known: object) -> object:
    """The function `name` of a text, in frames of this file."""
    exec(compile(text, str(file), "exec"), known)  # noqa: S102 - the frames are what is tried
    return known[name]


def raised(error: BaseException, file: Path, function: str = "work", *, own: bool) -> Failure:
    """The failure that `error` is if kdist's `function` raises it, called by a script or not."""
    text = f"def {function}(step=7):\n    fail()\n"
    fail = run("<library>", "def fail():\n    raise error\n", "fail", error=error)
    work = run(file, text, function, fail=fail)
    call = run("/srv/job/train.py", OWN, "call") if own else None
    with pytest.raises(type(error)) as found:
        call(work) if callable(call) else work()  # type: ignore[operator]
    # this file is the user's too, for all that kdist knows
    trace = found.value.__traceback__
    return describe(found.value.with_traceback(trace.tb_next if trace else None))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("function", ["load", "receive_state", "restore", "resume"])
def test_below_kdists_own_load_it_is_the_checkpoints_at_its_step(function: str, own: bool) -> None:
    found = raised(KeyError("exp_avg"), PACKAGE / "checkpoint" / "x.py", function, own=own)
    assert (found.cause, found.code, found.step) == (Cause.MISMATCH, Exit.MISMATCH, 7)
    assert found.rerun is Rerun.FIXED
    assert "checkpoint" in found.advice


def test_a_disk_that_fails_while_kdist_loads_is_the_storages() -> None:
    file = PACKAGE / "checkpoint" / "x.py"
    found = raised(OSError(errno.EIO, "Input/output error"), file, "load", own=True)
    assert (found.cause, found.fault, found.permanent) == (Cause.STORAGE, Fault.STORAGE, False)
    odd = raised(OSError(errno.EDOM, "odd"), file, "load", own=True)
    assert (odd.cause, odd.permanent) == (Cause.UNKNOWN, False)


@pytest.mark.parametrize("own", [True, False])
def test_in_kdists_other_frames_it_is_kdists_and_tried_again(own: bool) -> None:
    found = raised(KeyError("odd"), PACKAGE / "metrics" / "x.py", own=own)
    assert (found.cause, found.fault, found.permanent) == (Cause.UNKNOWN, Fault.KDIST, False)


def test_what_kdist_refuses_of_a_call_is_the_callers() -> None:
    text = "def step(number):\n    raise TypeError('a step is a number')\n"
    step = run(PACKAGE / "metrics" / "x.py", text, "step")
    call = run("/srv/job/train.py", "def call(step):\n    step('x')\n", "call")
    with pytest.raises(TypeError) as found:
        call(step)  # type: ignore[operator]
    trace = found.value.__traceback__
    failure = describe(found.value.with_traceback(trace.tb_next if trace else None))
    assert (failure.cause, failure.permanent) == (Cause.USER_CODE, True)
    assert failure.place == 'File "/srv/job/train.py", line 2, in call'


class Samples:
    """Fails in a process of a loader."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return {0: 1}[index + 5]


def test_an_error_in_a_process_of_a_loader_has_the_users_line() -> None:
    with pytest.raises(KeyError) as found:
        next(iter(DataLoader(Samples(), num_workers=1)))  # type: ignore[arg-type]  # of torch's sort
    failure = describe(found.value)
    assert (failure.cause, failure.fault) == (Cause.USER_CODE, Fault.USER)
    assert failure.place is not None
    assert failure.place.endswith("in __getitem__")


def fail_in_child(_: int) -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


def test_an_error_in_a_process_of_spawn_has_the_users_line() -> None:
    with pytest.raises(ProcessRaisedException) as found:
        start_processes(fail_in_child, nprocs=1, start_method="fork")  # type: ignore[no-untyped-call]  # torch's own
    failure = describe(found.value)
    assert (failure.cause, failure.signature) == (Cause.USER_CODE, "shape-product")
    assert failure.place is not None
    assert failure.place.endswith("in fail_in_child")


@pytest.mark.parametrize(
    ("error", "code", "fault"),
    [
        (DeviceFaultError("7 of 8 GPUs"), 204, Fault.DEVICE),
        (NodeFaultError("no driver"), 205, Fault.NODE),
        (Retry("later"), 206, Fault.USER),
    ],
)
def test_kdists_own_names_for_faults_are_tried_again(
    error: Exception, code: int, fault: Fault
) -> None:
    found = find(error)
    assert (int(found.code), found.fault, found.code.retryable) == (code, fault, True)


def test_full_memory_of_a_gpu_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4 << 30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = type("Device", (), {"total_memory": 8 << 30})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    found = describe(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
    assert (found.code, found.rerun) == (Exit.DEVICE_OOM, Rerun.FIXED)
    assert "train.microBatch" in found.advice
    assert "had 3.00 GiB in tensors and 4.00 GiB in all of 8.00 GiB" in found.advice


def test_a_full_disk_says_which_folder_and_how_much_is_free(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a" / "b.pt"))
    found = describe(error)
    assert (found.cause, found.fault) == (Cause.STORAGE, Fault.STORAGE)
    assert f"{tmp_path} has " in found.advice
    assert " bytes free" in found.advice


def test_no_copy_of_variables_stays_in_a_frame_that_goes_on() -> None:
    text = (
        "def fail(held):\n    raise ValueError\n"
        "def go_on(held, look):\n"
        "    try:\n        fail(held)\n"
        "    except ValueError as error:\n        look(error.__traceback__)\n"
        "    del held\n"
        "    yield\n"
    )
    held = nn.Module()
    reference = weakref.ref(held)
    going_on: Any = run(PACKAGE / "worker.py", text, "go_on")
    frames = going_on(held, frames_of)
    del held
    next(frames)
    assert reference() is None, "the error, its frames and what they hold go with the `except`"


@pytest.mark.parametrize("pad", [("x " * 10**6, ""), ("", " x" * 10**6)])
def test_of_a_long_message_both_ends_are_looked_at(pad: tuple[str, str]) -> None:
    text = "gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    error = RuntimeError(f"{pad[0]}{text}{pad[1]}")
    assert find(error).signature == "gloo-closed"
    assert len(Origin.of(error).text) < 10_000
