"""The errors that kdist raises, and the classification of any error into a cause and an exit code.

torch's errors are recognized by the names of their types and by their messages, so that this module
need not import torch.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import sysconfig
import traceback as tracebacks
from pathlib import Path

from kdist_trainer.config import Cause, Exit


class KdistTrainerError(Exception):
    """A failure whose cause is known where it is raised."""

    cause = Cause.UNKNOWN
    code = Exit.USER
    primary = True


class ConfigError(KdistTrainerError):
    """The job asks for something that cannot be done; the message says what to change."""

    cause, code = Cause.CONFIG, Exit.CONFIG


class BandwidthError(KdistTrainerError):
    """The bandwidth between the ranks is lower than the job demands; a restart on the same machines
    would measure the same.
    """

    cause, code = Cause.PREFLIGHT, Exit.CONFIG


class DataError(KdistTrainerError):
    """The data set is missing, empty or damaged."""

    cause, code = Cause.DATA, Exit.DATA


class CheckpointMismatchError(KdistTrainerError):
    """Checkpoint, data or storage do not match this job."""

    cause, code = Cause.MISMATCH, Exit.MISMATCH


class NonFiniteError(KdistTrainerError):
    """The loss is NaN or infinite, and the job says to stop then."""

    cause, code = Cause.NAN, Exit.NONFINITE


class StorageError(KdistTrainerError):
    """The checkpoint storage failed a write that the run needs; a restart may find it healthy."""

    cause, code = Cause.STORAGE, Exit.STORAGE


class PeersLostError(KdistTrainerError):
    """Other ranks were lost during a collective operation; their own nodes report the cause."""

    cause, code, primary = Cause.NODE_LOST, Exit.PEERS_LOST, False


# Patterns for `NAME: MESSAGE` of the errors in a chain.
_DEVICE_OOM = re.compile(
    r"^(torch\.)?(cuda\.)?OutOfMemoryError\b|CUDA out of memory|CUDA error: out of "
    r"memory|HIP out of memory"
)
_HOST_OOM = re.compile(r"DefaultCPUAllocator: (can't allocate memory|not enough memory)")
_ADDRESS_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_TIMEOUT = re.compile(
    r"Timed out waiting \d+\s*ms for (recv|send) operation|Watchdog caught collective "
    r"operation timeout"
    r"|Timeout waiting for|Application timeout caused pair closure"
)
_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken "
    r"pipe|connectFullMesh|[Ff]ailed to (recv|send|connect)"
    r"|remote process (exited|has terminated)|communicator was aborted|nccl\w*Error|NCCL error"
)
_LOADER_KILLED = re.compile(r"^RuntimeError: DataLoader worker \(pid [^)]*\) is killed by signal")
# torch's own messages about a collective contain one of these; a user's RuntimeError hardly does.
_ORIGIN = re.compile(r"gloo|NCCL|nccl|c10d|TCPStore|ProcessGroup|process group|monitoredBarrier")
_DIST_ERRORS = {
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistQueueEmptyError",
}


def classify(error: BaseException) -> tuple[Cause, Exit, bool]:
    """Classify an error by itself and the errors that it was raised from; returns the cause, the
    exit code and whether the failure is primary.
    """
    chain = _chain(error)
    for link in chain:
        if isinstance(link, KdistTrainerError):
            return link.cause, link.code, link.primary
    for link in chain:
        found = _classify_one(link)
        if found is not None:
            return found
    return Cause.USER_CODE, Exit.USER, True


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        # `__context__` is left out: an error raised while another one was handled is not explained
        # by it.
        link = link.__cause__
    return chain


def _raised_by_child(report: str) -> BaseException | None:
    """The error in a child's traceback, which torch's `spawn` reports as text; None for a type that
    is not classified.
    """
    lines = report.rpartition("Traceback (most recent call last):")[2].splitlines()
    start = next(
        (number for number, line in enumerate(lines) if line and not line[0].isspace()), None
    )
    if start is None:
        return None
    qualified, _, message = "\n".join(lines[start:]).partition(": ")
    name = qualified.rpartition(".")[2]
    if name in _DIST_ERRORS or name == "OutOfMemoryError":
        error: BaseException = type(name, (RuntimeError,), {})(message)
        return error
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(
        kind, RuntimeError | MemoryError | OSError | KeyboardInterrupt
    ):
        return None
    number = re.match(r"\[Errno (\d+)\]", message)
    return kind(int(number[1]), message) if number else kind(message)


def _classify_one(error: BaseException) -> tuple[Cause, Exit, bool] | None:
    name = type(error).__name__
    text = f"{name}: {error}"
    # a process that a script had started by torch.multiprocessing
    if name == "ProcessRaisedException":
        child = _raised_by_child(str(error))
        return None if child is None else _classify_one(child)
    if (
        name == "ProcessExitedException" and getattr(error, "signal_name", None)
    ) or _LOADER_KILLED.search(text):
        return Cause.SIGNAL, Exit.PEERS_LOST, True
    # SIGINT: the forkserver died, or somebody pressed Ctrl-C
    if isinstance(error, KeyboardInterrupt):
        return Cause.SIGNAL, Exit.PEERS_LOST, True
    if (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or _HOST_OOM.search(text)
    ):
        return Cause.OOM_HOST, Exit.HOST_OOM, True
    if _DEVICE_OOM.search(text):
        return Cause.OOM_DEVICE, Exit.DEVICE_OOM, True
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EIO,
        errno.EDQUOT,
        errno.EROFS,
    ):
        return Cause.STORAGE, Exit.STORAGE, True
    if not isinstance(error, RuntimeError | OSError) and name not in _DIST_ERRORS:
        return None  # a ValueError about time-outs is the user's own
    if _ADDRESS_TAKEN.search(text):
        # the port picked for the process group was taken meanwhile: a restart picks another
        return Cause.RENDEZVOUS, Exit.PEERS_LOST, True
    if isinstance(error, ConnectionError):
        return Cause.NODE_LOST, Exit.PEERS_LOST, False
    if name in _DIST_ERRORS or (type(error) is RuntimeError and _ORIGIN.search(text)):
        if _TIMEOUT.search(text):
            return Cause.COLLECTIVE_TIMEOUT, Exit.HANG, False
        if name in _DIST_ERRORS or _PEER.search(text):
            return Cause.NODE_LOST, Exit.PEERS_LOST, False
    return None


_LIBRARY_PREFIXES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parent,
    )
)


def is_user_code(filename: str) -> bool:
    """Whether a file belongs to the user, and not to Python, a library or kdist."""
    return not (filename.startswith(("<", *_LIBRARY_PREFIXES)) or "site-packages" in filename)


def find_place(error: BaseException) -> str | None:
    """The innermost line of the user's code in the traceback of `error`, else in those of the
    errors that it comes from; None if there is none.
    """
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        for frame in reversed(tracebacks.extract_tb(link.__traceback__)):
            if is_user_code(frame.filename):
                return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        seen.append(link)
        link = link.__cause__ or link.__context__
    return None
