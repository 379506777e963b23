"""The goodput report: where the time of a run went, as a whole and by attempt. A pure function of
the ledger's records.

An attempt is one generation: a worker group from its rendezvous to its end. Each second of it is in
one category, and so is the time before it. How a pod started (queue, image pull, fetched data) is
known only while the pod exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

from kdist.ledger import (
    Generation,
    Record,
    build_report,
    close_intervals,
    find_limits,
    last_saved,
    overlay,
    read_generations,
    read_spans,
    sum_seconds,
    up_to,
    valid_fields,
)
from kdist.report.text import LABELS

CATEGORIES = tuple(LABELS)
_MOST_POINTS = 600  # of the loss curve

Interval = tuple[float, float]
"""Begin and end in Unix time."""


@dataclass(frozen=True)
class PodStartup:
    """When one pod was created, scheduled and started, and when it had fetched its data, in Unix
    time; None if that is not known, or it fetched nothing.
    """

    created: float
    scheduled: float | None = None
    started: float | None = None
    pull_seconds: float = 0.0
    fetched: float | None = None


@dataclass
class Attempt:
    """One generation and the time before it: `seconds` by category, `spans` as (category, begin,
    end) in Unix time. Of its steps, `kept` count, `lost` were lost since a later generation began
    below them, and `unsaved` are in no checkpoint, though nothing runs that holds them.
    """

    generation: Generation
    began: float
    ended: float
    kept: int
    lost: int
    unsaved: int
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def add(self, category: str, since: float, until: float) -> None:
        if until > since:
            self.seconds[category] += until - since
            self.spans.append((category, since, until))


def build_goodput_report(
    events: Sequence[Record],
    steps: Sequence[Record],
    *,
    active: Sequence[tuple[float, float | None]],
    startups: Sequence[PodStartup] = (),
    unsaved: bool = False,
) -> dict[str, Any]:
    """The end report of a run, with its time by category, its attempts and its loss curve.

    Args:
        events: lines of events.jsonl, in their order.
        steps: lines of steps.jsonl, in their order.
        active: intervals in which the run was meant to run, in their order, in Unix time; an end is
            None if it was killed or still runs.
        startups: of the run's pods, as far as they are known.
        unsaved: whether nothing of the run runs any more, and it is not done, unless the ledger
            tells how it has ended: what it did after its last checkpoint is not saved.
    """
    names = (each.get("event") for each in reversed(events))
    last = next((name for name in names if name in ("generation", "done", "failed")), None)
    unsaved = last == "failed" or (unsaved and last != "done")
    report = build_report(events, steps, invocations=active, unsaved=unsaved)
    events = [valid_fields(event) for event in events]
    steps = [valid_fields(step) for step in steps]
    generations = read_generations(events, steps)
    intervals = close_intervals(active, generations, events)
    limits = [
        find_limits(generations),
        find_limits(generations, last=last_saved(events) if unsaved else inf),
    ]
    attempts = list(_attempts(generations, limits, events, intervals, startups))
    totals: dict[str, float] = defaultdict(float)
    for attempt in attempts:
        for category, seconds in attempt.seconds.items():
            totals[category] += seconds
    elapsed = report["elapsedSeconds"]
    totals["other"] += max(0.0, elapsed - sum(totals.values()))
    return {
        **report,
        "secondsByCategory": {name: round(totals[name], 3) for name in CATEGORIES},
        "attempts": [_document(attempt) for attempt in attempts],
        "lossCurve": list(_curve(steps)),
    }


def _attempts(
    generations: Sequence[Generation],
    limits: Sequence[Sequence[float]],
    events: Sequence[Record],
    intervals: Sequence[Interval],
    startups: Sequence[PodStartup],
) -> Iterator[Attempt]:
    """The attempts; `limits` are the last steps of each generation not lost, and that count."""
    before: Attempt | None = None
    for index, (one, limit, counts) in enumerate(zip(generations, *limits, strict=True)):
        after = generations[index + 1].began if index + 1 < len(generations) else inf
        ended = _end_of(one, events, after, intervals)
        lost, uncounted = one.count_after(limit), one.count_after(counts)
        kept = max(0, one.reached - one.from_step) - uncounted
        attempt = Attempt(one, one.began, ended, kept, lost, uncounted - lost)
        _fill_gap(attempt, before, intervals, startups)
        _fill(attempt, events, counts)
        before = attempt
        yield attempt


def _end_of(
    one: Generation,
    events: Sequence[Record],
    after: float,
    intervals: Sequence[Interval],
) -> float:
    """When the worker group ended: at its failure, at its last event, or with the run."""
    if one.failure and "time" in one.failure:
        return max(one.began, min(float(one.failure["time"]), after))
    own = [event for event in events if one.began <= event.get("time", -inf) < after]
    ends = [event["time"] for event in own if event.get("event") in ("done", "stopped")]
    if ends:
        return float(max(ends))
    known = [ended for began, ended in intervals if began <= one.began][-1:]
    end = max(known or [event["time"] for event in own], default=one.began)
    return max(one.began, min(after, end))


def _fill_gap(
    attempt: Attempt,
    before: Attempt | None,
    intervals: Sequence[Interval],
    startups: Sequence[PodStartup],
) -> None:
    """Categorize the time before this attempt, since the one before it or since the run began."""
    active_since = max(
        (began for began, _ in intervals if began <= attempt.began), default=attempt.began
    )
    since = max(active_since, before.ended) if before else active_since
    if before and before.ended >= active_since and attempt.generation.reason == "failure":
        attempt.add("down", since, attempt.began)
        return
    pods = [pod for pod in startups if since - 1 <= pod.created <= attempt.began]
    scheduled = max((pod.scheduled for pod in pods if pod.scheduled is not None), default=since)
    pulled = scheduled + max((pod.pull_seconds for pod in pods), default=0.0)
    fetched = max((pod.fetched for pod in pods if pod.fetched is not None), default=pulled)
    started = max((pod.started for pod in pods if pod.started is not None), default=fetched)
    times = [since, scheduled, pulled, fetched, started, attempt.began]
    for index in range(1, len(times)):
        times[index] = min(max(times[index], times[index - 1]), attempt.began)
    categories = ("queue", "imagePull", "fetch", "start", "rendezvous")
    for category, (begin, end) in zip(categories, pairwise(times), strict=True):
        attempt.add(category, begin, end)


def _fill(attempt: Attempt, events: Sequence[Record], limit: float) -> None:
    """Categorize the attempt's own time: start, steps (kept or lost), checkpoints, and the rest."""
    one = attempt.generation
    inside = [
        event for event in events if attempt.began <= event.get("time", -inf) <= attempt.ended
    ]
    own = (each for each in inside if each.get("generation") == one.number)
    first = next((each["time"] for each in own if each.get("event") == "first_step"), None)
    total = sum_seconds(one.done)
    wait = min(sum(span.wait_seconds for span in up_to(one.done, limit)), one.kept(limit))
    saving = sum(
        event.get("visible_seconds", 0.0) for event in inside if event.get("event") == "commit"
    )
    length = attempt.ended - attempt.began
    start = length if first is None and not total else 0.0
    if first is not None:
        start = max(0.0, first - attempt.began - one.first_seconds)
    rest = max(0.0, length - start - total - saving)
    failed = one.failure is not None
    if not one.observed:
        attempt.add("unobserved", attempt.began, attempt.ended)
        return
    parts = [
        ("start", start),
        ("productive", max(0.0, one.kept(limit) - wait)),
        ("allReduceWait", wait),
        ("checkpoint", saving),
        ("lost", total - one.kept(limit) + (rest if failed else 0.0)),
        ("other", 0.0 if failed else rest),
    ]
    at = attempt.began
    for category, seconds in parts:
        attempt.add(category, at, min(at + seconds, max(at, attempt.ended)))
        at = min(at + seconds, max(at, attempt.ended))


def _curve(steps: Sequence[Record]) -> Iterator[list[float]]:
    """(step, loss) by step, of a step that was done again the last loss, thinned out."""
    points = []
    for span in overlay(read_spans(steps)):
        try:
            loss = float.fromhex(span.loss or "")
        except (ValueError, OverflowError):
            continue
        if span.at == span.last and abs(loss) < inf:
            points.append([float(span.at), loss])
    stride = max(1, -(-len(points) // _MOST_POINTS))
    yield from (
        point
        for index, point in enumerate(points)
        if index % stride == 0 or index == len(points) - 1
    )


def _document(attempt: Attempt) -> dict[str, Any]:
    one = attempt.generation
    failure = one.failure or {}
    return {
        "generation": one.number,
        "reason": one.reason,
        "began": attempt.began,
        "ended": attempt.ended,
        "fromStep": one.from_step,
        "reachedStep": one.reached,
        "keptSteps": attempt.kept,
        "lostSteps": attempt.lost,
        "unsavedSteps": attempt.unsaved,
        "endedBy": failure.get("cause"),
        "failure": {name: failure.get(name) for name in ("rank", "node", "step", "message")}
        | ({"machine": failure["machine"]} if "machine" in failure else {})
        if failure
        else None,
        "secondsByCategory": {
            name: round(attempt.seconds[name], 3)
            for name in CATEGORIES
            if attempt.seconds.get(name)
        },
        "spans": [
            [category, round(since, 3), round(until, 3)] for category, since, until in attempt.spans
        ],
    }
