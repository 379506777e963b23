"""The end of an invocation: its report, which has the outcome, what the ledger recorded and where
the files are; the report as rows of a table; and the final message.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist.errors import Code, KdistError
from kdist.events import last_printed_line
from kdist.job.goals import describe_continuation
from kdist.job.local import run_dir
from kdist.job.local.run_dir import CheckpointLocation, RunFolder
from kdist.job.local.supervisor import Outcome
from kdist.job.local.trainer_tools import copy_records
from kdist.ledger import build_report, read_events, read_ledger, recoveries, valid_fields
from kdist.spec import Exit
from kdist.status import (
    BLOCKING,
    FETCHER,
    FIXED,
    SEPARATE_RANKS_FIX,
    ExitRecord,
    NonfiniteLoss,
    choose_rerun,
    describe_change,
    describe_separate_ranks,
    documents,
)
from kdist.units import count, number, seconds, size
from kdist_trainer.formats import CLI_API_VERSION

Report = Mapping[str, Any]


@dataclass(frozen=True)
class RunEnded:
    """Result of an invocation.

    Attributes:
        outcome: how the job ended.
        report: the end report.
        stopped_by: the signal that requested the stop; None without one.
        already: whether the run was done before, so that nothing was started.
    """

    outcome: Outcome
    report: Mapping[str, Any]
    stopped_by: signal.Signals | None = None
    already: bool = False

    @property
    def save_failed(self) -> bool:
        """Whether the job was stopped and could not save its state."""
        is_unsaved = self.outcome.code == Exit.STORAGE or bool(self.report.get("notSaved"))
        return self.outcome.kind == "stopped" and is_unsaved


def make_report(name: str, folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """Build the end report of the current invocation."""
    events, steps = read_ledger(folder.checkpoints)
    invocations = [(each["started"], each["ended"]) for each in folder.run["invocations"]]
    unsaved = outcome.kind != "done"  # a stop may have come when no rank had anything to save
    ledger = build_report(events, steps, invocations=invocations, unsaved=unsaved)
    ledger["metrics"] = (
        ledger["metrics"] or (folder.done() or {}).get("metrics") or {}
    )  # DONE is written before the ledger's line
    started, ended = invocations[-1] if invocations else (0.0, 0.0)
    records = [run_dir.read_json(path) for path in sorted(folder.root.glob("node-*/exit.json"))]
    loss = NonfiniteLoss.gather(records)
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
        "nonFiniteLoss": None if loss is None else loss.to_document(),
        "folder": str(folder.root),
        "checkpointFolder": CheckpointLocation.of_run(folder.run).text,
    }


def write_report(
    name: str, folder: RunFolder, outcome: Outcome, *, log_event: Callable[..., None] | None
) -> dict[str, Any]:
    """Write the end report to the run folder and return it; a failed write does not change how the
    job ended. `log_event` is the session's, if it has begun.
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


def read_saved_step(checkpoints: Path) -> tuple[int | None, float | None]:
    """Step of the last checkpoint in the folder and the Unix time of its commit, as the ledger
    recorded them; None if there is none.
    """
    for event in map(valid_fields, reversed(read_events(checkpoints))):
        if event.get("event") == "commit" and "step" in event:
            return event["step"], event.get("time")
    return None, None


def summary_rows(report: Report) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of every known result."""
    steps, restarts, checkpoints = report["steps"], report["restarts"], report["checkpoints"]
    yield "outcome", str(report["outcome"])
    yield from (("warning", str(each)) for each in report["warnings"])
    if steps["reached"]:  # a script may report no steps
        yield "steps", f"{steps['reached']:,}"
    if steps["reached"] and steps["lost"] is not None:
        yield "lost steps", f"{steps['lost']:,}"
    if gaps := report.get("ledgerGaps"):
        yield "ledger", _describe_gaps(gaps)
    if steps["samples"] is not None:
        yield "samples", number(steps["samples"])
    causes = ", ".join(f"{cause} {count}" for cause, count in restarts["byCause"].items())
    yield "restarts", f"{restarts['total']}" + (f" ({causes})" if causes else "")
    if restarts["joins"]:
        yield "joins", str(restarts["joins"])
    if report["recoverySeconds"]:
        yield "recovery", recoveries(report["recoverySeconds"])
    if report["goodput"] is not None and report["productiveSeconds"]:
        spent = [seconds(report[f"{each}Seconds"]) for each in ("productive", "elapsed")]
        yield "goodput", f"{report['goodput']:.1%} ({spent[0]} of {spent[1]})"
    if checkpoints["committed"]:
        waited, of = (seconds(checkpoints[each]) for each in ("visibleSeconds", "seconds"))
        written = checkpoints.get("bytesPerHour")
        rate = f", {size(written)} written an hour" if written else ""
        last = f"{checkpoints['committed']}, last {size(checkpoints['bytes'])}{rate}"
        yield "checkpoints", f"{last}; the training waited {waited} of {of}"
    if at_risk := checkpoints.get("atRiskSeconds"):
        yield "not saved", f"the last {seconds(at_risk)} of training"
    if checkpoints["fellBack"]:
        yield "damaged checkpoints", f"{checkpoints['fellBack']}, skipped"
    if report["loss"] is not None:
        yield "final loss", number(report["loss"])
    if report.get("nonFiniteLoss"):
        yield "loss", _nonfinite(report)
    if report.get("separateRanks"):
        yield "process group", f"none of {report['separateRanks']} ranks has formed one"
    for name, value in report["metrics"].items():
        is_share = name == "accuracy" and isinstance(value, float)
        yield f"test {name}", f"{value:.2%}" if is_share else number(value)
    shown = {"ran on": report["devices"], "tracker": report.get("tracker")}
    yield from ((name, str(each)) for name, each in shown.items() if each)
    if report.get("trackerBehind"):
        yield "tracker", "steps are missing in it; see `tracker-failed` in the log"
    later = f" (invocation {report['invocation']})" if report["invocation"] > 1 else ""
    yield "wall time", f"{seconds(report['wallSeconds'])}{later}"
    yield "folder", str(report["folder"])


def _describe_gaps(gaps: Sequence[Sequence[int]]) -> str:
    total = sum(last - first + 1 for first, last in gaps)
    shown = [f"{first:,}-{last:,}" if last > first else f"{first:,}" for first, last in gaps[:3]]
    more = " and more" if len(gaps) > 3 else ""
    where = f"{', '.join(shown)}{more}"
    return f"has no line of {count(f'{total:,}', 'step')} ({where}): times and goodput lack them"


def _nonfinite(report: Report) -> str:
    return str(NonfiniteLoss.read({"nonfinite_loss": report["nonFiniteLoss"]}))


def conclude(ended: RunEnded, again: str) -> str | KdistError:
    """The final message, or the error. `again` are the arguments of `kdist run`."""
    report, kind = ended.report, ended.outcome.kind
    saved = report["steps"]["committed"]
    kept = f"step {saved:,} is saved" if saved else "nothing was saved yet"
    kept += describe_unsaved(report)
    if ended.already:
        return (
            f"{report['job']} is done already. Next: kdist run --fresh {again}   trains it "
            "again and archives this run"
        )
    if kind == "done" and report.get("nonFiniteLoss"):
        return f"{report['job']} is done, but its loss was {_nonfinite(report)}."
    if kind == "done" and (ranks := report.get("separateRanks")):
        words = f"{report['job']} is done, but {describe_separate_ranks(ranks)}"
        return f"{words}; {SEPARATE_RANKS_FIX}"
    if kind == "done":
        return f"{report['job']} is done."
    if kind == "failed":
        return _failed(ended, again)
    if ended.save_failed:
        return KdistError(
            f"{report['job']} stopped, but its state could not be saved; {kept}",
            next_command=f"kdist run {again}",
            code=Code.JOB_FAILED,
        )
    how = "was ended at once" if kind == "killed" else "stopped"
    then = describe_continuation(saved)
    return f"{report['job']} {how}; {kept}. Next: kdist run {again}   {then}"


def _failed(ended: RunEnded, again: str) -> KdistError:
    failure = ended.report["failure"] or {}
    code = ended.outcome.code
    record = ExitRecord.read({"code": code, **failure}) or ExitRecord(code)
    node = failure.get("node") or failure.get("agent") or ""
    where = " ".join(
        part
        for part in (
            f"rank {failure['rank']}" if failure.get("rank") is not None else "",
            f"on {node}" if not node.startswith(FETCHER) else "",
            f"at step {failure['step']}" if failure.get("step") is not None else "",
        )
        if part
    )
    cause = failure.get("cause") or f"exit code {code}"
    own = failure.get("place")
    is_users = failure.get("fault") == "user"
    place = (
        [own]
        if own
        else [
            line.strip()
            for line in failure.get("traceback") or ()
            if line.strip().startswith('File "') and not is_users
        ]
    )
    if choose_rerun(record) == BLOCKING:
        place = []  # kernels report late: the line is not to be trusted
    advice = failure.get("advice")
    command, change = describe_next(record, f"kdist run {again}")
    return KdistError(
        (
            f"{ended.report['job']} failed ({cause}){f', {where}' if where else ''}: "
            f"{failure.get('message') or 'see its log'}"
        ),
        hint="; ".join(
            [
                *([advice] if advice and advice != _fix(record) else []),
                *(failure.get("collectives") or ())[:8],
                *place[-1:],
                f"its log is {failure.get('log')}",
            ]
        ),
        next_command=command,
        change=change,
        code=Code.JOB_FAILED,
    )


def _fix(record: ExitRecord) -> str:
    """What to do before the run is started again."""
    return describe_change(record, installs=True, told="hint" if record.advice else "message")


def describe_next(record: ExitRecord, command: str) -> tuple[str, str]:
    """The command that continues the run, and what to do before; empty where nothing needs to."""
    rerun = choose_rerun(record)
    if rerun == BLOCKING:
        return f"CUDA_LAUNCH_BLOCKING=1 {command}", ""
    return command, _fix(record) if rerun == FIXED else ""
