"""The errors that kdist raises, and the classification of any error into a cause and an exit code.

torch's errors are recognized by the names of their types and by their messages, so that this module
need not import torch. The table of what is recognized is `kdist_trainer.causes`.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdist_trainer.causes.advice import HEALTH_CHECK
from kdist_trainer.causes.host import REPLICAS_DIFFER
from kdist_trainer.causes.search import (
    Classification,
    Origin,
    frames_of,
    is_user_code,
    judge,
    look_up,
)
from kdist_trainer.config import Cause, Exit
from kdist_trainer.config.exit_codes import CODES, FAULTS, Fault, Rerun


class KdistTrainerError(Exception):
    """A failure whose cause is known where it is raised; its exit code is that of the cause."""

    cause = Cause.UNKNOWN
    code = Exit.USER
    primary = True
    signature = ""
    """The row of the table of causes that says more about it."""

    def __init_subclass__(cls) -> None:
        cls.code = CODES.get(cls.cause, cls.code)


class ConfigError(KdistTrainerError):
    """The job asks for something that cannot be done; the message says what to change."""

    cause = Cause.CONFIG


class BandwidthError(KdistTrainerError):
    """The bandwidth between the ranks is lower than the job demands; a restart on the same machines
    would measure the same.
    """

    cause, code = Cause.PREFLIGHT, Exit.CONFIG


class DataError(KdistTrainerError):
    """The data set is missing, empty or damaged."""

    cause = Cause.DATA


class CheckpointMismatchError(KdistTrainerError):
    """Checkpoint, data or storage do not match this job."""

    cause = Cause.MISMATCH


class NonFiniteError(KdistTrainerError):
    """The loss is NaN or infinite, and the job says to stop then."""

    cause = Cause.NAN


class StorageError(KdistTrainerError):
    """The checkpoint storage failed a write that the run needs; a restart may find it healthy."""

    cause = Cause.STORAGE


class DeviceFaultError(KdistTrainerError):
    """A GPU of this node has failed or is missing; on another node the job may train."""

    cause = Cause.DEVICE


class NodeFaultError(KdistTrainerError):
    """This node has failed its health check; another node may train."""

    cause, signature = Cause.NODE, HEALTH_CHECK


class Retry(KdistTrainerError):  # noqa: N818 - what a script says, not what went wrong
    """Raised by a script or a workload to be tried again: kdist restarts all ranks, within the
    job's limit of restarts.
    """

    cause, signature = Cause.RETRY, "retry"


class ReplicasDifferError(KdistTrainerError):
    """Ranks hold different values of one model: something that changes them is in no state. All
    ranks start again from the newest checkpoint.
    """

    cause, signature = Cause.RETRY, REPLICAS_DIFFER


class PeersLostError(KdistTrainerError):
    """Other ranks were lost during a collective operation; their own nodes report the cause."""

    cause, primary = Cause.NODE_LOST, False


def find(error: BaseException) -> Classification:
    """What an error is, by itself and by the errors that it was raised from."""
    # `__context__` is left out: an error raised while another one was handled is not explained by
    # it
    chain = list(_links(error, contexts=False))
    for link in chain:
        if isinstance(link, KdistTrainerError):
            fault = FAULTS.get(link.cause, Fault.UNKNOWN)
            is_final = link.primary and not link.code.retryable
            rerun = Rerun.FIXED if is_final else Rerun.AGAIN
            return Classification(
                link.cause, link.code, link.primary, link.signature, fault, rerun=rerun
            )
    origins = [Origin.of(link) for link in chain]
    for origin in origins:
        found = look_up(origin)
        if found is not None:
            return found
    return judge(origins[0])


def classify(error: BaseException) -> tuple[Cause, Exit, bool]:
    """Classify an error; returns the cause, the exit code and whether the failure is primary."""
    found = find(error)
    return found.cause, found.code, found.primary


def find_place(error: BaseException) -> str | None:
    """The innermost line of the user's code in the traceback of `error`, or of the process that it
    reports, else in those of the errors that it comes from; None if there is none.
    """
    for link in _links(error, contexts=True):
        origin = Origin.of(link)
        for frames in (origin.frames, frames_of(link.__traceback__)):
            own = [frame for frame in frames if is_user_code(frame.file)]
            if own:
                return own[-1].place
    return None


def _links(error: BaseException, *, contexts: bool) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        yield link
        seen.append(link)
        link = link.__cause__ or (link.__context__ if contexts else None)
