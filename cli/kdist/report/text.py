"""The goodput report as lines and rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist.ledger import recoveries
from kdist.status import SEPARATE_RANKS_FIX, NonfiniteLoss, describe_separate_ranks
from kdist.status.agent_status import read_machine_faults
from kdist.units import number, seconds

LABELS = {
    "queue": "queue",
    "imagePull": "image pull",
    "fetch": "fetch of data",
    "rendezvous": "rendezvous",
    "start": "start",
    "productive": "productive",
    "allReduceWait": "all-reduce wait",
    "checkpoint": "checkpoint",
    "lost": "lost or not saved",
    "down": "down",
    "unobserved": "unobserved",
    "other": "other",
}
USEFUL = ("productive", "allReduceWait")
"""The categories that goodput is made of."""
ATTEMPTS = ("ATTEMPT", "WHY", "FROM", "STEPS", "KEPT", "LOST", "TIME", "GOODPUT", "ENDED BY")
GOODPUT = (
    "goodput is productive + all-reduce wait (any waiting for peers): the time of the steps "
    "that count"
)
_LONGEST_MESSAGE = 60  # characters

Report = Mapping[str, Any]


def totals(report: Report) -> list[tuple[str, str, str]]:
    """(category, time, share) of the whole run, and their sum."""
    found, elapsed = report["secondsByCategory"], report["elapsedSeconds"]
    rows = [
        (label, seconds(found[name]), _share(found[name], elapsed))
        for name, label in LABELS.items()
        if found.get(name)
    ]
    return [*rows, ("total", seconds(elapsed), _share(sum(found.values()), elapsed))]


def attempts(report: Report) -> list[tuple[str, ...]]:
    """One row per attempt."""
    return [_attempt(one) for one in report["attempts"]]


def _attempt(one: Mapping[str, Any]) -> tuple[str, ...]:
    by_category = one["secondsByCategory"]
    total = sum(by_category.values())
    if by_category.get("unobserved"):  # a script that reports no steps
        unknown = ("-",) * 4
        return str(one["generation"]), str(one["reason"]), *unknown, seconds(total), "-", _end(one)
    # steps that a later attempt began below, and those that only the next one will
    lost, unsaved = one["lostSteps"], one.get("unsavedSteps") or 0
    parts = [number(lost)] if lost or not unsaved else []
    return (
        str(one["generation"]),
        str(one["reason"]),
        f"step {number(one['fromStep'])}",
        number(one["reachedStep"] - one["fromStep"]),
        number(one["keptSteps"]),
        ", ".join([*parts, *([f"{number(unsaved)} not saved"] if unsaved else [])]),
        seconds(total),
        _share(sum(by_category.get(name, 0.0) for name in USEFUL), total),
        _end(one),
    )


def _end(one: Mapping[str, Any]) -> str:
    """What ended an attempt: the cause, and the failure's message or its rank."""
    if not one.get("endedBy"):
        return "-"
    failure = one.get("failure") or {}
    message = next(iter(str(failure.get("message") or "").splitlines()), "")
    if message and len(message) <= _LONGEST_MESSAGE:
        return f"{one['endedBy']}: {message}"
    rank = failure.get("rank")
    return str(one["endedBy"]) if rank is None else f"{one['endedBy']} (rank {rank})"


def headline(report: Report) -> str:
    """The run in one line."""
    goodput = report.get("goodput")
    return f"goodput {'unknown' if goodput is None else f'{goodput:.1%}'} · {summary(report)}"


def remarks(report: Report) -> list[str]:
    """Sentences about what a reader would not expect of the run."""
    ranks = report.get("separateRanks")
    told = [f"{describe_separate_ranks(ranks)}; {SEPARATE_RANKS_FIX}"] if ranks else []
    if report.get("trackerBehind"):
        told.append("steps are missing in the tracker; see `tracker-failed` in the log")
    faults = read_machine_faults(report, "machineFaults")
    return [*told, *(f"faulty machine {each}" for each in faults)]


def environment(report: Report) -> list[str]:
    """What the attempts computed with, and what the job was applied from."""
    found = []
    for each in report["environments"]:
        known = ", ".join(f"{name} {each[name]}" for name in each if name != "sinceAttempt")
        found.append(f"since attempt {each['sinceAttempt']}: {known}")
    found += [f"applied from commit {commit}" for commit in [report.get("appliedCommit")] if commit]
    return [*found, *(f"image {each}" for each in report.get("images") or ())]


def summary(report: Report) -> str:
    """The run in one line without its goodput: steps, restarts, loss."""
    steps, restarts = report["steps"], report["restarts"]
    reached = "steps unknown" if steps["reached"] is None else f"{number(steps['reached'])} steps"
    unsaved = f", {number(report['notSaved'])} not saved" if report.get("notSaved") else ""
    parts = [
        reached + ("" if steps["lost"] is None else f", {number(steps['lost'])} lost") + unsaved,
        f"{restarts['total']} restart{'' if restarts['total'] == 1 else 's'}",
    ]
    if report["recoverySeconds"]:
        parts.append(f"recovered in {recoveries(report['recoverySeconds'])}")
    if report.get("loss") is not None:
        parts.append(f"loss {number(report['loss'])}")
    if (loss := NonfiniteLoss.read({"nonfinite_loss": report.get("nonFiniteLoss")})) is not None:
        parts.append(f"loss {loss}")
    return " · ".join(parts)


def _share(part: float, total: float) -> str:
    return f"{part / total:.1%}" if total > 0 else "-"
