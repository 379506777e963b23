"""The goodput receipt: where the time of a run went, as a whole and by attempt. Pure: the ledger's
records in, one document out.

An attempt is one generation: a group of ranks from its rendezvous to its end. All its time is put
into categories, and so is the time before it. What pods can tell of their start (queue, image pull)
is known only while they are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

from kdist.report.ledger import (
    Generation,
    Record,
    build_report,
    clean,
    last_signs,
    read_generations,
)

CATEGORIES = (
    "queue",
    "imagePull",
    "rendezvous",
    "start",
    "productive",
    "allReduceWait",
    "checkpoint",
    "lost",
    "down",
    "unobserved",
    "other",
)
_MOST_POINTS = 600


@dataclass(frozen=True)
class PodStartup:
    """One pod's way to its first process, in unix seconds; None for what nobody knows any more."""

    created: float
    scheduled: float | None = None
    started: float | None = None
    pull_seconds: float = 0.0


@dataclass
class Attempt:
    """One generation and the time before it. `seconds` are by category, `spans` say when:
    (category, from, to).
    """

    generation: Generation
    began: float
    ended: float
    kept: int
    lost: int
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    def add(self, category: str, since: float, until: float) -> None:
        """Put a stretch of time into a category."""
        if until > since:
            self.seconds[category] += until - since
            self.spans.append((category, since, until))


def build_receipt(
    events: Sequence[Record],
    steps: Sequence[Record],
    *,
    lives: Sequence[tuple[float, float | None]],
    births: Sequence[PodStartup] = (),
) -> dict[str, Any]:
    """The receipt.

    Args:
        events: lines of events.jsonl, in their order.
        steps: lines of steps.jsonl, in their order.
        lives: unix times between which somebody kept the run going; None where it is not over.
        births: how the run's pods came to life, as far as it is known.
    """
    report = build_report(events, steps, invocations=lives)
    events, steps = [clean(event) for event in events], [clean(step) for step in steps]
    attempts = list(_attempts(read_generations(events, steps), events, steps, lives, births))
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
    events: Sequence[Record],
    steps: Sequence[Record],
    lives: Sequence[tuple[float, float | None]],
    births: Sequence[PodStartup],
) -> Iterator[Attempt]:
    limits = [*(later.from_step for later in generations[1:]), inf][: len(generations)]
    for index in range(len(limits) - 2, -1, -1):
        limits[index] = min(limits[index], limits[index + 1])
    waits = _waits(steps)
    before: Attempt | None = None
    for index, (one, limit) in enumerate(zip(generations, limits, strict=True)):
        after = generations[index + 1].began if index + 1 < len(generations) else inf
        ended = _end_of(one, events, after, lives)
        kept = [step for step in one.productive if step <= limit]
        lost = max(0, one.reached - int(limit)) if limit < inf else 0
        attempt = Attempt(one, one.began, ended, len(kept), lost)
        _fill_gap(attempt, before, lives, births)
        _fill(attempt, events, waits.get(one.number, {}), limit)
        before = attempt
        yield attempt


def _end_of(
    one: Generation,
    events: Sequence[Record],
    after: float,
    lives: Sequence[tuple[float, float | None]],
) -> float:
    """When the group ended: by its failure, its word, or with the last that was heard of it."""
    if one.failure and "time" in one.failure:
        return max(one.began, min(float(one.failure["time"]), after))
    heard = [event["time"] for event in events if one.began <= event.get("time", -inf) < after]
    said = [
        event["time"]
        for event in events
        if event.get("event") in ("done", "stopped") and event.get("time") in heard
    ]
    if said:
        return float(max(said))
    closed = next(
        (ended for began, ended in reversed(lives) if ended is not None and began <= one.began),
        None,
    )
    signs = [] if closed is not None and closed > one.began else last_signs([one], events)
    end = after if after < inf else max([*heard, closed or 0.0, one.began, *signs])
    return max(one.began, end)


def _fill_gap(
    attempt: Attempt,
    before: Attempt | None,
    lives: Sequence[tuple[float, float | None]],
    births: Sequence[PodStartup],
) -> None:
    """Put the time between the attempt before (or the birth of this life) and this one into
    categories.
    """
    life = max((began for began, _ in lives if began <= attempt.began), default=attempt.began)
    since = max(life, before.ended) if before else life
    if before and before.ended >= life and attempt.generation.reason == "failure":
        attempt.add("down", since, attempt.began)
        return
    born = [one for one in births if since - 1 <= one.created <= attempt.began]
    scheduled = max((one.scheduled for one in born if one.scheduled is not None), default=since)
    pulled = scheduled + max((one.pull_seconds for one in born), default=0.0)
    started = max((one.started for one in born if one.started is not None), default=pulled)
    marks = [since, scheduled, pulled, started, attempt.began]
    for index in range(1, len(marks)):
        marks[index] = min(max(marks[index], marks[index - 1]), attempt.began)
    for category, (left, right) in zip(
        ("queue", "imagePull", "start", "rendezvous"), pairwise(marks), strict=True
    ):
        attempt.add(category, left, right)


def _fill(
    attempt: Attempt, events: Sequence[Record], waits: Mapping[int, float], limit: float
) -> None:
    """Put the attempt's own time into categories: start, steps (kept or lost), checkpoints, and
    what is left.
    """
    one = attempt.generation
    inside = [
        event for event in events if attempt.began <= event.get("time", -inf) <= attempt.ended
    ]
    first = next(
        (
            e["time"]
            for e in inside
            if e.get("event") == "first_step" and e.get("generation") == one.number
        ),
        None,
    )
    total = sum(one.productive.values())
    wait = min(sum(seconds for step, seconds in waits.items() if step <= limit), one.kept(limit))
    saving = sum(
        event.get("visible_seconds", 0.0) for event in inside if event.get("event") == "commit"
    )
    length = attempt.ended - attempt.began
    start = length if first is None and not total else 0.0
    if first is not None:
        start = max(0.0, first - attempt.began - next(iter(one.productive.values()), 0.0))
    left = max(0.0, length - start - total - saving)
    broken = one.failure is not None
    if not one.observed:
        attempt.add("unobserved", attempt.began, attempt.ended)
        return
    parts = [
        ("start", start),
        ("productive", max(0.0, one.kept(limit) - wait)),
        ("allReduceWait", wait),
        ("checkpoint", saving),
        ("lost", total - one.kept(limit) + (left if broken else 0.0)),
        ("other", 0.0 if broken else left),
    ]
    at = attempt.began
    for category, seconds in parts:
        attempt.add(category, at, min(at + seconds, max(at, attempt.ended)))
        at = min(at + seconds, max(at, attempt.ended))


def _waits(steps: Sequence[Record]) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for line in steps:
        if "generation" in line and "step" in line:
            found[line["generation"]][line["step"]] = float(line.get("wait_seconds", 0.0))
    return found


def _curve(steps: Sequence[Record]) -> Iterator[list[float]]:
    """(step, loss), the last word on each step, thinned."""
    last: dict[int, float] = {}
    for line in steps:
        try:
            last[line["step"]] = float.fromhex(line["loss"])
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    points = [[float(step), loss] for step, loss in sorted(last.items()) if abs(loss) < inf]
    share = max(1, -(-len(points) // _MOST_POINTS))
    yield from (
        point
        for index, point in enumerate(points)
        if index % share == 0 or index == len(points) - 1
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
        "endedBy": failure.get("cause"),
        "failure": {name: failure.get(name) for name in ("rank", "node", "step", "message")}
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
