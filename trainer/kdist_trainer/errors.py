"""Failures: what went wrong in one rank, told from what merely followed, in a form that outlives
the rank.

A rank writes its failure beside its heartbeat before it ends; its agent reads it, agents exchange
them, and the first *primary* one over all agents decides. A peer that died shows on the survivors
as `Connection closed by peer` inside `backward()`: that is secondary and decides nothing. torch is
told by the names of its types and its messages, so that readers of failures need not import it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import json
import os
import re
import sysconfig
import time
import traceback as tracebacks
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kdist_trainer import preallocated
from kdist_trainer.config import Cause, Exit

TRACEBACK_LINES = 40
_MESSAGE_LENGTH = 2000


class KdistTrainerError(Exception):
    """A failure whose cause is known where it is raised."""

    cause = Cause.UNKNOWN
    code = Exit.USER
    primary = True


class ConfigError(KdistTrainerError):
    """What the job asks for cannot be done; its message says what to change."""

    cause, code = Cause.CONFIG, Exit.CONFIG


class BandwidthError(KdistTrainerError):
    """The network between the ranks gives less than the job demands; on the same machines another
    try would find the same.
    """

    cause, code = Cause.PREFLIGHT, Exit.CONFIG


class DataError(KdistTrainerError):
    """The data set is missing, empty or damaged."""

    cause, code = Cause.DATA, Exit.DATA


class CheckpointMismatchError(KdistTrainerError):
    """Checkpoint, data or storage do not fit this job."""

    cause, code = Cause.MISMATCH, Exit.MISMATCH


class NonFiniteError(KdistTrainerError):
    """The loss is NaN or infinite and the job says stop."""

    cause, code = Cause.NAN, Exit.NONFINITE


class StorageError(KdistTrainerError):
    """The storage of checkpoints refused what must be kept; another try may find it healthy."""

    cause, code = Cause.STORAGE, Exit.STORAGE


class PeersLostError(KdistTrainerError):
    """Other ranks are gone in the middle of what all do together; why they are gone is told where
    they were.
    """

    cause, code, primary = Cause.NODE_LOST, Exit.PEERS_LOST, False


@dataclass(frozen=True)
class Failure:
    """One rank's failure. `time` is Unix time, `traceback` its last lines, `collective` what the
    rank was in.

    `place` is the innermost line of the user's own code that was at work, in a traceback's form.
    `collectives` says what each rank of the group was in, in words, where this is the failure that
    decided.
    """

    cause: Cause
    code: Exit
    primary: bool
    message: str
    rank: int | None = None
    node: str = ""
    generation: int = 0
    step: int | None = None
    time: float = 0.0
    traceback: tuple[str, ...] = ()
    collective: str | None = None
    collectives: tuple[str, ...] = ()
    place: str | None = None

    @property
    def permanent(self) -> bool:
        """Whether another try cannot help, so that it ends the job."""
        return self.primary and not self.code.retryable

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Read what `to_json` wrote. Raises `ValueError` for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["cause"], fields["code"] = Cause(fields["cause"]), Exit(fields["code"])
            fields["traceback"] = tuple(fields.get("traceback", ()))
            fields["collectives"] = tuple(fields.get("collectives", ()))
            return cls(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a failure: {error}") from error


# Tried in this order on the type's name and the message of every error in the chain: (pattern,
# cause, code, primary).
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
# What torch itself says of a collective names one of these; a user's own RuntimeError hardly does.
_ORIGIN = re.compile(r"gloo|NCCL|nccl|c10d|TCPStore|ProcessGroup|process group|monitoredBarrier")
_WORLD = {
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistQueueEmptyError",
}


def classify(error: BaseException) -> tuple[Cause, Exit, bool]:
    """Cause, exit code and whether it is primary, from `error` and the errors that it was raised
    from.
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


def _raised_by_child(told: str) -> BaseException | None:
    """The error that torch's `spawn` tells of in the words of a child's traceback; None for one of
    no kind that matters here.
    """
    lines = told.rpartition("Traceback (most recent call last):")[2].splitlines()
    start = next(
        (number for number, line in enumerate(lines) if line and not line[0].isspace()), None
    )
    if start is None:
        return None
    qualified, _, message = "\n".join(lines[start:]).partition(": ")
    name = qualified.rpartition(".")[2]
    if name in _WORLD or name == "OutOfMemoryError":
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
    said = f"{name}: {error}"
    # a process that a script had started by torch.multiprocessing
    if name == "ProcessRaisedException":
        child = _raised_by_child(str(error))
        return None if child is None else _classify_one(child)
    if (
        name == "ProcessExitedException" and getattr(error, "signal_name", None)
    ) or _LOADER_KILLED.search(said):
        return Cause.SIGNAL, Exit.PEERS_LOST, True
    # SIGINT: its forkserver died, or somebody at a terminal
    if isinstance(error, KeyboardInterrupt):
        return Cause.SIGNAL, Exit.PEERS_LOST, True
    if (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or _HOST_OOM.search(said)
    ):
        return Cause.OOM_HOST, Exit.HOST_OOM, True
    if _DEVICE_OOM.search(said):
        return Cause.OOM_DEVICE, Exit.DEVICE_OOM, True
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EIO,
        errno.EDQUOT,
        errno.EROFS,
    ):
        return Cause.STORAGE, Exit.STORAGE, True
    if not isinstance(error, RuntimeError | OSError) and name not in _WORLD:
        return None  # a ValueError that talks of time-outs is the user's own
    if _ADDRESS_TAKEN.search(said):
        # the port picked for the group was taken meanwhile: pick another
        return Cause.RENDEZVOUS, Exit.PEERS_LOST, True
    if isinstance(error, ConnectionError):
        return Cause.NODE_LOST, Exit.PEERS_LOST, False
    if name in _WORLD or (type(error) is RuntimeError and _ORIGIN.search(said)):
        if _TIMEOUT.search(said):
            return Cause.COLLECTIVE_TIMEOUT, Exit.HANG, False
        if name in _WORLD or _PEER.search(said):
            return Cause.NODE_LOST, Exit.PEERS_LOST, False
    return None


_NOT_THE_USERS = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parent,
    )
)


def is_user_code(filename: str) -> bool:
    """Whether a file belongs to the user, and not to Python, a library or kdist."""
    return not (filename.startswith(("<", *_NOT_THE_USERS)) or "site-packages" in filename)


def find_place(error: BaseException) -> str | None:
    """The innermost line of the user's code in `error`'s traceback, else in those it comes from;
    None where there is none.
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


def describe(error: BaseException, **known: Any) -> Failure:
    """A `Failure` of `error` now, with the fields given in `known`."""
    cause, code, primary = classify(error)
    lines = "".join(tracebacks.format_exception(error)).splitlines()
    return replace(
        Failure(
            cause=cause,
            code=code,
            primary=primary,
            message=f"{type(error).__name__}: {error}"[:_MESSAGE_LENGTH],
            time=time.time(),
            traceback=tuple(line[:500] for line in lines[-TRACEBACK_LINES:]),
            place=find_place(error),
        ),
        **known,
    )


def path_of(scratch: Path, local_rank: int) -> Path:
    """Where the rank leaves its failure."""
    return scratch / f"rank-{local_rank}.failure.json"


def record(
    error: BaseException,
    *,
    scratch: Path | None = None,
    local_rank: int | None = None,
    rank: int | None = None,
    step: int | None = None,
    collective: str | None = None,
) -> Failure:
    """Leave `error` for the agent, at once and also on a full disk; what is not given is taken from
    the environment of a rank.

    The first failure of a rank stands: recording again writes nothing. Never raises `OSError`: a
    rank that ends must end.
    """
    environ = os.environ
    if rank is None and environ.get("RANK", "").isdigit():
        rank = int(environ["RANK"])
    failure = describe(
        error,
        rank=rank,
        node=environ.get("KDIST_NODE", ""),
        generation=int(environ.get("KDIST_GENERATION", "0")),
        step=step,
        collective=collective,
    )
    folder = scratch or (Path(environ["KDIST_SCRATCH"]) if "KDIST_SCRATCH" in environ else None)
    if folder is None:
        return failure
    path = path_of(
        folder, int(environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
    )
    with contextlib.suppress(OSError):
        preallocated.write(path, _fitted(failure).to_json().encode())
    return failure


def _fitted(failure: Failure) -> Failure:
    """The failure with so much of its traceback's end as there is room for."""
    while failure.traceback and len(failure.to_json().encode()) > preallocated.SIZE:
        failure = replace(failure, traceback=failure.traceback[1 + len(failure.traceback) // 4 :])
    return failure


def read(scratch: Path, local_rank: int) -> Failure | None:
    """What the rank left, or None."""
    try:
        return Failure.from_json(preallocated.read(path_of(scratch, local_rank)))
    except (OSError, ValueError):
        return None
