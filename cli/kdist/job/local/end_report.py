"""The end report of an invocation: the outcome, what the ledger recorded, where the files are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kdist.errors import KdistError
from kdist.events import last_printed_line
from kdist.job.local import run_dir
from kdist.job.local.run_dir import CheckpointLocation, RunFolder
from kdist.job.local.supervisor import Outcome
from kdist.job.local.trainer_tools import copy_records
from kdist.ledger import build_report, read_events, read_ledger, valid_fields
from kdist.status import NonfiniteLoss, documents
from kdist.units import count
from kdist_trainer.formats import CLI_API_VERSION


def make_report(name: str, folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """Build the end report of the current invocation.

    Args:
        name: name of the job.
        folder: its run folder.
        outcome: how the invocation ended.
    """
    events, steps = read_ledger(folder.checkpoints)
    invocations = [(each["started"], each["ended"]) for each in folder.run["invocations"]]
    unsaved = outcome.kind != "done"  # a stop may have come when no rank had anything to save
    ledger = build_report(events, steps, invocations=invocations, unsaved=unsaved)
    ledger["metrics"] = (
        ledger["metrics"] or (folder.done() or {}).get("metrics") or {}
    )  # DONE is written before the ledger's line
    started, ended = invocations[-1] if invocations else (0.0, 0.0)
    return {
        "apiVersion": CLI_API_VERSION,
        "kind": "RunReport",
        "job": name,
        "runId": folder.run_id,
        "outcome": outcome.kind,
        "trainerExitCode": outcome.code,
        "failure": _failure(folder, outcome),
        "invocation": folder.invocation,
        "warnings": list(folder.warnings),
        "wallSeconds": round((ended or started) - started, 3),
        **ledger,
        "nonFiniteLoss": read_nonfinite_loss(folder),
        "folder": str(folder.root),
        "checkpointFolder": CheckpointLocation.of_run(folder.run).text,
    }


def write_report(
    name: str, folder: RunFolder, outcome: Outcome, *, log_event: Callable[..., None] | None
) -> dict[str, Any]:
    """Write the end report to the run folder and return it; a failed write does not change how the
    job ended.

    Args:
        name: name of the job.
        folder: its run folder.
        outcome: how the invocation ended.
        log_event: of the session, if it has begun.
    """
    problems: list[tuple[str, str]] = []
    bucket = CheckpointLocation.of_run(folder.run)
    if bucket.is_bucket:
        try:
            copy_records(bucket, folder.checkpoints)
        except KdistError as error:
            problems.append(("records-not-read", str(error)))
    try:
        folder.end(outcome.kind)
        report = make_report(name, folder, outcome)
        run_dir.write_json(folder.root / "report.json", report)
    except OSError as error:
        report = make_report(name, folder, outcome)
        message = f"the end report cannot be written to {folder.root}: {error.strerror}"
        problems.append(("report-not-kept", message))
    if log_event is not None:
        for event, message in problems:
            log_event("kdist", event, message=message)
    return report


def describe_unsaved(report: Mapping[str, Any]) -> str:
    """The steps that were not saved at the end, to follow what was; empty if all were."""
    steps = documents.integer(report, "notSaved") or 0
    if not steps:
        return ""
    what = count(f"{steps:,}", "step")
    if not documents.integer(report, "steps", "committed"):
        return f", of {what}"
    return f", the {what} after it {'is' if steps == 1 else 'are'} not"


def _failure(folder: RunFolder, outcome: Outcome) -> dict[str, Any] | None:
    """Return the exit record of the agent that ended the job, with the path of its log; None if
    the job did not fail.
    """
    if outcome.kind != "failed" or outcome.node is None:
        return None
    log = folder.log(outcome.node)
    record = run_dir.read_json(folder.root / outcome.node / "exit.json") or {
        "message": last_printed_line(log)
    }
    failed_on = record.get("node")  # another node's agent may be the first to end
    if isinstance(failed_on, str) and re.fullmatch(r"node-\d+", failed_on):
        log = folder.log(failed_on)
    return {**record, "agent": outcome.node, "log": str(log)}


def read_nonfinite_loss(folder: RunFolder) -> dict[str, Any] | None:
    """How often a script has reported a loss that is NaN or infinite, and such a loss if it was the
    last one; None if none was.
    """
    records = [run_dir.read_json(path) for path in sorted(folder.root.glob("node-*/exit.json"))]
    loss = NonfiniteLoss.gather(records)
    return None if loss is None else loss.to_document()


def read_saved_step(checkpoints: Path) -> tuple[int | None, float | None]:
    """Step of the last checkpoint in the folder and the Unix time of its commit, as the ledger
    recorded them; None if there is none.
    """
    for event in map(valid_fields, reversed(read_events(checkpoints))):
        if event.get("event") == "commit" and "step" in event:
            return event["step"], event.get("time")
    return None, None
