"""The end report of an invocation: the outcome, what the ledger recorded, where the files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdist.events import last_printed_line
from kdist.local import run_dir
from kdist.local.run_dir import RunFolder
from kdist.local.supervisor import Outcome
from kdist.report.ledger import build_report, read_ledger, valid_fields

REPORT_VERSION = "cli.kdist.dev/v1"


def make_report(name: str, folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """Build the end report of the current invocation.

    Args:
        name: name of the job.
        folder: its run folder.
        outcome: how the invocation ended.
    """
    events, steps = read_ledger(folder.checkpoints)
    invocations = [(each["started"], each["ended"]) for each in folder.run["invocations"]]
    ledger = build_report(events, steps, invocations=invocations)
    ledger["metrics"] = (
        ledger["metrics"] or (folder.done() or {}).get("metrics") or {}
    )  # DONE is written before the ledger's line
    started, ended = invocations[-1] if invocations else (0.0, 0.0)
    return {
        "apiVersion": REPORT_VERSION,
        "kind": "RunReport",
        "job": name,
        "runId": folder.run_id,
        "outcome": outcome.kind,
        "trainerExitCode": outcome.code,
        "failure": _failure(folder, outcome),
        "invocation": folder.invocation,
        "wallSeconds": round((ended or started) - started, 3),
        **ledger,
        "folder": str(folder.root),
        "checkpointFolder": str(folder.checkpoints),
    }


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
    return {**record, "agent": outcome.node, "log": str(log)}


def read_saved_step(checkpoints: Path) -> tuple[int | None, float | None]:
    """Step of the last checkpoint in the folder and the Unix time of its commit, as the ledger
    recorded them; None if there is none.
    """
    events, _ = read_ledger(checkpoints)
    for event in map(valid_fields, reversed(events)):
        if event.get("event") == "commit" and "step" in event:
            return event["step"], event.get("time")
    return None, None
