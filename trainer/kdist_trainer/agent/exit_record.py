"""The exit record: how a run ended, and its root cause. All agents of a run write the same one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Cause, Exit, TrainConfig
from kdist_trainer.config.changes import compare_done
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats import stamp
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.ipc.failure import Failure

RECORD = "exit.json"
TERMINATION_BYTES = 4096
"""The most bytes of a termination message that Kubernetes keeps."""


class RunOutcome(Exception):  # noqa: N818 - a success as well as a failure leaves the agent's loop
    """Raised when the agent's work is over; `record` is the exit record."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record.get("message"))
        self.record = record

    @property
    def code(self) -> Exit:
        return Exit(self.record["code"])


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The first primary failure; without one, a timeout rather than a lost peer; None without
    failures.
    """
    ordered = sorted(failures, key=lambda failure: failure.time)
    for failure in ordered:
        if failure.primary:
            return failure
    for failure in ordered:
        if failure.code is Exit.HANG:
            return failure
    return ordered[0] if ordered else None


def success(*, step: int | None, separate_ranks: int = 0) -> dict[str, Any]:
    """The exit record of a completed run.

    Args:
        step: The last step.
        separate_ranks: The number of its ranks if none has formed a process group with others.
    """
    return {
        "code": int(Exit.DONE),
        "cause": None,
        "outcome": "done",
        "message": "done",
        "step": step,
        **({"separate_ranks": separate_ranks} if separate_ranks else {}),
    }


def stopped(message: str, *, step: int | None) -> dict[str, Any]:
    """The exit record of an agent that stopped on request."""
    return {
        "code": int(Exit.STOPPED),
        "cause": Cause.PREEMPTED.value,
        "outcome": "stopped",
        "message": message,
        "step": step,
    }


def failed(failure: Failure) -> dict[str, Any]:
    """The exit record of a run that ends because of `failure`."""
    return {**failure.to_document(), "outcome": "failed"}


def write_record(
    record: dict[str, Any], scratch: Path, termination_message: Path | None = None
) -> None:
    """Write the record to `scratch`, and a short form where Kubernetes reads it. An `OSError` is
    ignored, since the exit code is still reported.
    """
    fresh = scratch / f"{RECORD}.new"
    record = stamp(RECORD, record)
    with suppress(OSError):
        fresh.write_bytes(
            encode_json(record, indent=2, ensure_ascii=False).encode(errors="replace") + b"\n"
        )
        fresh.replace(scratch / RECORD)
    if termination_message is not None:
        write_termination_message(record, termination_message)


def write_termination_message(record: dict[str, Any], path: Path) -> None:
    """Write a short form of the record where Kubernetes reads it. An `OSError` is ignored."""
    with suppress(OSError):  # a mounted file: it can be written, not replaced
        path.write_bytes(shorten(stamp(RECORD, record)))


def shorten(record: dict[str, Any], limit: int = TERMINATION_BYTES) -> bytes:
    """The record as JSON of at most `limit` bytes: the beginning of the traceback is cut first,
    then the ends of strings and lists.
    """
    for length, most in ((2000, 32), (500, 16), (50, 4)):
        short = {
            name: value[:length] if isinstance(value, str) else value
            for name, value in record.items()
        }
        if isinstance(record.get("collectives"), list):
            short["collectives"] = [line[:length] for line in record["collectives"][:most]]
        lines = [line[:length] for line in record.get("traceback") or []]
        while True:
            text = encode_json({**short, "traceback": lines}, ensure_ascii=False).encode(
                errors="replace"
            )
            if len(text) <= limit:
                return text
            if not lines:
                break
            lines = lines[1:]
    return encode_json({"code": record["code"]}).encode()


def read_done(
    checkpoints: StoragePath | None, config: TrainConfig, *, run_id: str
) -> dict[str, Any] | None:
    """The DONE document of the run's last commit; None while the job, as it is now, is not done.

    Raises:
        CheckpointMismatchError: If the run has ended, and the job was edited since in a way that
            cannot continue from its last checkpoint.
    """
    done = CheckpointDirectory(checkpoints).done() if checkpoints is not None else None
    if done is None or done.get("run_id", run_id) != run_id:
        return None
    finished = compare_done(done, config.to_job())
    if finished.problem is not None:
        raise CheckpointMismatchError(finished.problem)
    return done if finished.is_complete else None
