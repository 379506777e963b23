"""Classification of errors: root causes and secondary failures, by torch's real messages."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import ConfigError, classify, find_place
from kdist_trainer.ipc.failure import describe

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"


def of_torch(name: str, message: str) -> BaseException:
    """An error with the name of one of torch's own, which are RuntimeErrors."""
    error: BaseException = type(name, (RuntimeError,), {})(message)
    return error


def of_spawn(last: str) -> BaseException:
    """What `torch.multiprocessing.spawn` raises for a child that ended by an error of these last
    words.
    """
    reported = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    step()\n'
    )
    first = (
        f"{reported}ValueError: first\n\nThe above exception was the direct cause of the "
        "following exception:\n\n"
    )
    return ProcessRaisedException(
        f"\n\n-- Process 0 terminated with the following error:\n{first}{reported}{last}\n", 0, 71
    )


LOST = (Cause.NODE_LOST, Exit.PEERS_LOST, False)
MEMORY = (Cause.OOM_HOST, 72, True)
DEVICE = (Cause.OOM_DEVICE, 71, True)
OWN = (Cause.USER_CODE, 70, True)
SIGNAL = (Cause.SIGNAL, 201, True)
LOADER = (Cause.LOADER, 201, True)
ODD = (Cause.UNKNOWN, 207, True)
FULL = (Cause.STORAGE, 203, True)
SILENT = "Timed out waiting 3000ms for recv operation to complete"
GONE = "NCCL error: remote process exited or there was a network error"
TAKEN = "The server socket has failed to bind. EADDRINUSE"
ABSENT = "Timed out after 61 seconds waiting for clients. 1/2 clients joined."
NO_ROOM = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8e15 bytes"
ABORTED = "process 0 terminated with signal SIGABRT"

# What torch 2.13 raises, copied from real runs.
SAID = [
    (RuntimeError(f"{GLOO}pair.cc:537] Connection closed by peer [127.0.0.1]:2718"), *LOST),
    (
        RuntimeError(f"{GLOO}pair.cc:537] Read error [127.0.0.1]:61666: Connection reset by peer."),
        *LOST,
    ),
    (
        RuntimeError("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error"),
        *LOST,
    ),
    (RuntimeError(f"{GLOO}unbound_buffer.cc:78] {SILENT}"), Cause.COLLECTIVE_TIMEOUT, 202, False),
    (of_torch("DistStoreError", ABSENT), *LOST),
    (of_torch("DistBackendError", GONE), *LOST),
    (of_torch("DistNetworkError", TAKEN), Cause.RENDEZVOUS, 201, True),
    (of_torch("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB"), *DEVICE),
    (RuntimeError("CUDA error: out of memory"), *DEVICE),
    (MemoryError(), *MEMORY),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), *MEMORY),
    (RuntimeError(NO_ROOM), *MEMORY),
    (OSError(errno.ENOSPC, "No space left on device"), *FULL),
    (FileNotFoundError(errno.ENOENT, "No such file"), *OWN),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), *LOST),
    (RuntimeError("the database said: Connection refused"), *ODD),
    (ValueError("gloo: Connection closed by peer"), *OWN),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), *OWN),
    (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), *LOADER),
    (of_spawn("RuntimeError: Connection closed by peer\nin gloo"), *LOST),
    (of_spawn("torch.distributed.DistStoreError: Timed out after 61 seconds"), *LOST),
    (of_spawn("OSError: [Errno 28] No space left on device: 'x'"), *FULL),
    (of_spawn("MemoryError"), *MEMORY),
    (of_spawn("KeyError: 'label'"), *OWN),
    (of_spawn("own.Odd: gloo Connection closed by peer"), *OWN),
    (ProcessRaisedException("odd", 0, 1), *ODD),
    (ProcessExitedException(ABORTED, 0, 1, -6, "SIGABRT"), *SIGNAL),
    (ProcessExitedException("process 0 terminated with exit code 3", 0, 1, 3), *OWN),
    (ConfigError("no such workload"), Cause.CONFIG, 64, True),
]


@pytest.mark.parametrize(
    ("error", "cause", "code", "primary"),
    SAID,
    ids=[str(error)[-40:] or "empty" for error, *_ in SAID],
)
def test_an_error_is_classified(
    error: BaseException, cause: Cause, code: int, primary: bool
) -> None:
    assert classify(error) == (cause, code, primary)


def test_an_error_raised_from_a_lost_peer_is_secondary_and_one_raised_in_a_handler_is_not() -> None:
    peer = RuntimeError(f"{GLOO}pair.cc:537] Connection closed by peer")
    wrapped = ValueError("step failed")
    wrapped.__cause__ = peer
    assert classify(wrapped) == (Cause.NODE_LOST, Exit.PEERS_LOST, False)
    in_handler = ValueError("in the handler")
    in_handler.__context__ = peer
    assert classify(in_handler) == (Cause.USER_CODE, Exit.USER, True)


def test_the_place_of_a_failure_is_the_innermost_line_that_the_user_wrote(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import json\ndef load():\n    json.loads('{')\nload()\n")
    code = compile(script.read_text(), str(script), "exec")
    with pytest.raises(ValueError, match="Expecting") as raised:
        exec(code, {})  # noqa: S102 - as the runner of scripts does
    assert describe(raised.value).place == f'File "{script}", line 3, in load'
    assert find_place(ValueError("raised nowhere")) is None


def test_host_memory_that_torch_cannot_allocate_is_classified() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert classify(raised.value) == (Cause.OOM_HOST, Exit.HOST_OOM, True)
