"""The summary of a run on this machine: when its agents started, the end report as rows of a table,
and the final message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kdist.errors import Code, KdistError
from kdist.events import parse
from kdist.job.local.end_report import describe_unsaved
from kdist.job.local.runner import RunEnded
from kdist.ledger import recoveries
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
)
from kdist.units import count, number, seconds, size

_FIRST_EVENT = b'"rendezvous-started"'
_FETCHED_EVENT = b'"data-ready"'

Lifetime = tuple[float, float | None]


def starts(
    root: Path, lifetimes: Sequence[Lifetime]
) -> Iterator[tuple[float, float | None, float]]:
    """For each active interval of the run and each node: the unix times at which the interval
    began, all data was fetched (None if none was), and the node's agent had started.
    """
    fetched = [at for log in root.glob("fetch-*/log") for at in _times(log, _FETCHED_EVENT)]
    for log in sorted(root.glob("node-*/log")):
        times = list(_times(log, _FIRST_EVENT))
        for lifetime in lifetimes:
            if inside := _select(times, lifetime):
                yield lifetime[0], max(_select(fetched, lifetime), default=None), inside[0]


def _select(times: Sequence[float], lifetime: Lifetime) -> list[float]:
    began, ended = lifetime
    return [at for at in times if began <= at and (ended is None or at <= ended)]


def _times(log: Path, name: bytes) -> Iterator[float]:
    """Unix times of the events of a log with this name."""
    try:
        with log.open("rb") as lines:
            for line in lines:
                event = parse(line.decode(errors="replace")) if name in line else None
                if event is not None:
                    yield datetime.fromisoformat(str(event["time"])).timestamp()
    except (OSError, ValueError, KeyError):
        return


Report = Mapping[str, Any]


def summary_rows(report: Report) -> list[tuple[str, str]]:
    """(name, value) of every known result."""
    outcome, *results = _rows(report)
    return [outcome, *(("warning", str(each)) for each in report["warnings"]), *results]


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    steps, restarts, checkpoints = report["steps"], report["restarts"], report["checkpoints"]
    yield "outcome", str(report["outcome"])
    yield from _step_rows(report)
    if steps["samples"] is not None:
        yield "samples", number(steps["samples"])
    causes = ", ".join(f"{cause} {count}" for cause, count in restarts["byCause"].items())
    yield "restarts", f"{restarts['total']}" + (f" ({causes})" if causes else "")
    if restarts["joins"]:
        yield "joins", str(restarts["joins"])
    if report["recoverySeconds"]:
        yield "recovery", recoveries(report["recoverySeconds"])
    if report["goodput"] is not None and report["productiveSeconds"]:
        yield (
            "goodput",
            (
                f"{report['goodput']:.1%} ({seconds(report['productiveSeconds'])} of "
                f"{seconds(report['elapsedSeconds'])})"
            ),
        )
    if checkpoints["committed"]:
        waited = (
            f"the training waited {seconds(checkpoints['visibleSeconds'])} of "
            f"{seconds(checkpoints['seconds'])}"
        )
        written = checkpoints.get("bytesPerHour")
        rate = f", {size(written)} written an hour" if written else ""
        yield (
            "checkpoints",
            f"{checkpoints['committed']}, last {size(checkpoints['bytes'])}{rate}; {waited}",
        )
    if at_risk := checkpoints.get("atRiskSeconds"):
        yield "not saved", f"the last {seconds(at_risk)} of training"
    if checkpoints["fellBack"]:
        yield "damaged checkpoints", f"{checkpoints['fellBack']}, skipped"
    yield from _losses(report)
    for name, value in report["metrics"].items():
        yield (
            f"test {name}",
            f"{value:.2%}" if name == "accuracy" and isinstance(value, float) else number(value),
        )
    yield from (("ran on", str(each)) for each in [report["devices"]] if each)
    yield (
        "wall time",
        seconds(report["wallSeconds"])
        + (f" (invocation {report['invocation']})" if report["invocation"] > 1 else ""),
    )
    yield "folder", str(report["folder"])


def _step_rows(report: Report) -> Iterator[tuple[str, str]]:
    steps = report["steps"]
    if steps["reached"]:  # a script may report no steps
        yield "steps", f"{steps['reached']:,}"
    if steps["reached"] and steps["lost"] is not None:
        yield "lost steps", f"{steps['lost']:,}"
    if gaps := report.get("ledgerGaps"):
        yield "ledger", _describe_gaps(gaps)


def _describe_gaps(gaps: Sequence[Sequence[int]]) -> str:
    total = sum(last - first + 1 for first, last in gaps)
    shown = [f"{first:,}-{last:,}" if last > first else f"{first:,}" for first, last in gaps[:3]]
    more = " and more" if len(gaps) > 3 else ""
    where = f"{', '.join(shown)}{more}"
    return f"has no line of {count(f'{total:,}', 'step')} ({where}): times and goodput lack them"


def _losses(report: Report) -> Iterator[tuple[str, str]]:
    if report["loss"] is not None:
        yield "final loss", number(report["loss"])
    if report.get("nonFiniteLoss"):
        yield "loss", _nonfinite(report)
    if report.get("separateRanks"):
        yield "process group", f"none of {report['separateRanks']} ranks has formed one"


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
    then = "continues from there" if saved else "starts from the beginning"
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
        next_command=describe_next(record, f"kdist run {again}"),
        code=Code.JOB_FAILED,
    )


def _fix(record: ExitRecord) -> str:
    """What to do before the run is started again."""
    return describe_change(record, installs=True, told="hint" if record.advice else "message")


def describe_next(record: ExitRecord, command: str) -> str:
    """The command that continues the run; after a failure that must repeat, what to do before."""
    rerun = choose_rerun(record)
    if rerun == BLOCKING:
        return f"CUDA_LAUNCH_BLOCKING=1 {command}"
    return f"{_fix(record)}, then {command}" if rerun == FIXED else command
