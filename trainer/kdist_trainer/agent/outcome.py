"""How a run ended: the failure that decides, and the exit record that all agents write alike."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint.layout import CheckpointDirectory
from kdist_trainer.config import Cause, Exit
from kdist_trainer.failure import Failure

RECORD = "exit.json"
_TERMINATION_LOG = "KDIST_TERMINATION_LOG"
_TERMINATION_LOG_BYTES = 4000  # Kubernetes keeps 4096


class Ended(Exception):  # noqa: N818 - it is how the agent's loop is left, well or badly
    """The agent's work is over; `record` says how."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record.get("message"))
        self.record = record

    @property
    def code(self) -> Exit:
        return Exit(self.record["code"])


def deciding(failures: Iterable[Failure]) -> Failure | None:
    """The failure that decides: the first primary one; without any, a time-out before a lost peer; None without failures."""
    ordered = sorted(failures, key=lambda failure: failure.time)
    for failure in ordered:
        if failure.primary:
            return failure
    for failure in ordered:
        if failure.code is Exit.HANG:
            return failure
    return ordered[0] if ordered else None


def success(*, step: int | None) -> dict[str, Any]:
    """The record of a run that is done."""
    return {"code": int(Exit.DONE), "cause": None, "outcome": "done", "message": "done", "step": step}


def stopped(message: str, *, step: int | None) -> dict[str, Any]:
    """The record of an agent that stopped on request."""
    return {
        "code": int(Exit.STOPPED),
        "cause": Cause.PREEMPTED.value,
        "outcome": "stopped",
        "message": message,
        "step": step,
    }


def failed(failure: Failure) -> dict[str, Any]:
    """The record of a run that ends because of `failure`."""
    return {**json.loads(failure.to_json()), "outcome": "failed"}


def write_record(record: dict[str, Any], scratch: Path) -> None:
    """Write the record to `scratch` and, in a pod, to the termination message. Never raises: the exit code still speaks."""
    places = [(scratch / RECORD, json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n")]
    if path := os.environ.get(_TERMINATION_LOG):
        places.append((Path(path), _short(record)))
    for place, text in places:
        try:
            # A pod's termination log is a mounted file: it can be written, not replaced.
            if place.name == RECORD:
                fresh = place.with_name(place.name + ".new")
                fresh.write_bytes(text)
                fresh.replace(place)
            else:
                place.write_bytes(text)
        except OSError:
            continue


def _short(record: dict[str, Any]) -> bytes:
    """The record in at most 4000 bytes, by leaving out the traceback's first lines."""
    record = dict(record)
    lines = list(record.get("traceback") or [])
    while True:
        text = json.dumps({**record, "traceback": lines}, ensure_ascii=False).encode()
        if len(text) <= _TERMINATION_LOG_BYTES or not lines:
            return text[:_TERMINATION_LOG_BYTES]
        lines = lines[1:]


def read_done(checkpoints: Path | None, *, run_id: str) -> dict[str, Any] | None:
    """What the run's last commit left; None while the run has not ended."""
    if checkpoints is None:
        return None
    done = CheckpointDirectory(checkpoints).done()
    return done if done is not None and done.get("run_id", run_id) == run_id else None
