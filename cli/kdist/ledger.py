"""The end report of a run, computed from the records of the ledger next to its checkpoints.

Lines of the ledger may be torn, missing or out of order after a crash; the report then covers the
rest. A record stands for one step, or, with `steps`, for the steps up to its own
(`kdist_trainer.formats.step_lines`). Successive steps of a generation become one `Span`; where a
span has to be divided, because a later generation did its last steps again, its seconds are,
evenly.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, Final

from kdist.errors import KdistError
from kdist.units import number, seconds
from kdist_trainer.formats import (
    EVENTS_FILE,
    LEDGER,
    STEPS_FILE,
    NewerFormatError,
    check_format,
)
from kdist_trainer.formats.machine_faults import list_machine_faults
from kdist_trainer.formats.step_lines import StepLines
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_object


@dataclass(frozen=True, slots=True)
class Span:
    """Steps `first` to `last` of one generation, and the loss after step `at`, as it is written."""

    generation: int
    first: int
    last: int
    seconds: float
    wait_seconds: float
    loss: str | None
    at: int

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    def within(self, first: int, last: float) -> Span | None:
        first, last = max(first, self.first), self.last if last >= self.last else int(last)
        if (first, last) == (self.first, self.last):
            return self
        if first > last:
            return None
        share = (last - first + 1) / self.steps
        seconds, waits = self.seconds * share, self.wait_seconds * share
        return replace(self, first=first, last=last, seconds=seconds, wait_seconds=waits)


def read_spans(steps: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The spans of records whose fields are valid, in their order."""
    return [
        Span(
            line["generation"],
            line["step"] - max(1, min(line.get("steps", 1), line["step"])) + 1,
            line["step"],
            float(line.get("seconds", 0.0)),
            float(line.get("wait_seconds", 0.0)),
            line.get("loss"),
            line["step"],
        )
        for line in steps
        if "generation" in line and "step" in line
    ]


def overlay(spans: Iterable[Span]) -> list[Span]:
    """Spans that do not overlap, by step: of a step that occurs again, the last one."""
    found: list[Span] = []
    for span in spans:
        if not found or found[-1].last < span.first:
            found.append(span)
            continue
        begin = bisect_left(found, span.first, key=lambda one: one.last)
        end = begin
        while end < len(found) and found[end].first <= span.last:
            end += 1
        replaced = found[begin:end]
        parts = [one.within(one.first, span.first - 1) for one in replaced[:1]]
        parts += [span, *(one.within(span.last + 1, inf) for one in replaced[-1:])]
        found[begin:end] = [part for part in parts if part is not None]
    return found


def sum_seconds(spans: Sequence[Span], limit: float = inf) -> float:
    """Seconds of the steps up to `limit`."""
    return sum(part.seconds for part in up_to(spans, limit))


def up_to(spans: Iterable[Span], limit: float) -> list[Span]:
    """The spans of the steps up to `limit`."""
    parts = (span.within(span.first, limit) for span in spans)
    return [part for part in parts if part is not None]


Record = Mapping[str, Any]
_LINE_BYTES: Final = 1 << 20
_SEPARATE: Final = "separate-ranks"
_PIECE_BYTES: Final = 1 << 18


def read_ledger(checkpoints: Path) -> tuple[list[Record], list[Record]]:
    """(events, steps) of the run whose checkpoints are in the folder, as far as they can be
    read; of very many steps, successive ones are one record (`step_lines`).
    """
    events = read_events(checkpoints)
    try:
        with (checkpoints / LEDGER / STEPS_FILE).open("rb", buffering=0) as file:
            lines = StepLines(events, nbytes=os.fstat(file.fileno()).st_size)
            while piece := file.read(_PIECE_BYTES):
                lines.add(piece)
        return events, [*lines.records()]
    except NewerFormatError as error:
        raise KdistError(f"the ledger cannot be read: {error}") from None
    except OSError:
        return events, []


def read_events(checkpoints: Path) -> list[Record]:
    """The events alone, of a run with any number of steps."""
    try:
        with (checkpoints / LEDGER / EVENTS_FILE).open("rb") as file:
            return list(parse_lines(file))
    except OSError:
        return []


def parse_lines(file: BinaryIO) -> Iterator[Record]:
    """The JSON objects in a file, one on each line; torn and too long lines are left out. Raises
    `KdistError` if a newer version wrote one.
    """
    while line := file.readline(_LINE_BYTES):
        try:
            record = parse_object(line, max_bytes=_LINE_BYTES, allow_nan=True)
        except MalformedTextError:
            continue
        try:
            check_format(EVENTS_FILE, record)
        except NewerFormatError as error:
            raise KdistError(f"the ledger cannot be read: {error}") from None
        yield record


_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("generation", "step", "from_step", "kept_step", "last", "bytes"), int),
    **dict.fromkeys(("rank", "ranks"), int),
    "steps": int,
    **dict.fromkeys(("time", "seconds", "visible_seconds", "wait_seconds"), (int, float)),
    **dict.fromkeys(("event", "cause", "reason", "loss", "node", "message", "entrypoint"), str),
    **dict.fromkeys(("machine", "fault"), str),
    **dict.fromkeys(("commits", "written"), int),
    **dict.fromkeys(("devices", "url"), str),
    **dict.fromkeys(("metrics", "environment"), dict),
}


def valid_fields(record: Record) -> Record:
    """The fields that the report uses, of the right type and finite."""
    found = {
        name: record[name] for name, type_ in _TYPES.items() if isinstance(record.get(name), type_)
    }
    return {
        name: value
        for name, value in found.items()
        if not isinstance(value, bool) and not (isinstance(value, float) and not isfinite(value))
    }


@dataclass(frozen=True)
class Generation:
    """One worker group of a run: `began` in Unix time, `reached` is its last step, `done` its
    finished steps.
    """

    number: int
    reason: str
    began: float
    from_step: int
    reached: int
    done: Sequence[Span]
    failure: Record | None
    observed: bool = True
    """Whether its ranks report their steps; those of a script may be unknown."""
    previous_failure: Record | None = None
    """The failure that ended the generation before. If an agent was killed early, it is all that is
    known of that generation.
    """

    @property
    def first_seconds(self) -> float:
        first = self.done[0] if self.done else None
        return first.seconds / first.steps if first else 0.0

    def kept(self, limit: float) -> float:
        """Seconds of the steps up to `limit`, those that no later generation did again."""
        return sum_seconds(self.done, limit)

    def count_after(self, limit: float) -> int:
        """How many of its own steps are after `limit`, the one in which it failed included."""
        return max(0, self.reached - int(max(limit, self.from_step))) if limit < inf else 0


def read_generations(events: Sequence[Record], steps: Sequence[Record]) -> list[Generation]:
    """The generations in their order."""
    by_generation: dict[int, list[Span]] = {}
    for span in read_spans(steps):
        by_generation.setdefault(span.generation, []).append(span)
    failures: dict[int, Record] = {}
    for event in _named(events, "failure"):
        known = failures.get(event.get("generation", 0))
        if known is None or event.get("time", inf) < known.get("time", inf):
            failures[event.get("generation", 0)] = event
    generations = []
    begun = sorted(_named(events, "generation"), key=lambda event: event.get("generation", 0))
    # Where a rank has kept the state, the step in which the group failed was not finished.
    kept = {
        event["generation"] - 1: int(event["kept_step"]) for event in begun if "kept_step" in event
    }
    for event in begun:
        number, failure = event.get("generation", 0), failures.get(event.get("generation", 0))
        done = overlay(by_generation.get(number, ()))
        from_step = event.get("from_step", 0)
        in_progress = failure.get("step", 0) if failure else 0
        reached = kept.get(number, max([from_step, *(span.last for span in done), in_progress]))
        reason, began = event.get("reason", "start"), event.get("time", 0.0)
        found = Generation(
            number,
            reason,
            began,
            from_step,
            reached,
            done,
            failure,
            observed=event.get("entrypoint") != "script" or bool(done),
            previous_failure=failures.get(number - 1),
        )
        generations.append(found)
    return generations


def find_limits(generations: Sequence[Generation], *, last: float = inf) -> list[float]:
    """The last step of each generation that counts; `last` is that of the last generation."""
    limits = [*(later.from_step for later in generations[1:]), last][: len(generations)]
    for index in range(len(limits) - 2, -1, -1):
        # a later generation may have resumed from an even earlier step
        limits[index] = min(limits[index], limits[index + 1])
    return limits


def last_saved(events: Iterable[Record]) -> int:
    """The step of the newest checkpoint that was committed; 0 without one."""
    return max((commit.get("step", 0) for commit in _named(events, "commit")), default=0)


def _named(events: Iterable[Record], name: str) -> Iterator[Record]:
    return (event for event in events if event.get("event") == name)


def _said_last(events: Sequence[Record], name: str) -> Record:
    """The last event of the name since a generation began; empty if there is none."""
    names = ("generation", name)
    last = next((each for each in reversed(events) if each.get("event") in names), None)
    return last if last and last["event"] == name else {}


def build_report(
    events: Sequence[Record],
    steps: Sequence[Record],
    *,
    invocations: Sequence[tuple[float, float | None]],
    unsaved: bool = False,
) -> dict[str, Any]:
    """The part of the end report that the ledger contains; None stands for what is not known, such
    as the steps of a script.

    Args:
        events: lines of events.jsonl, in their order.
        steps: lines of steps.jsonl, in their order.
        invocations: Unix times at which each `kdist run` began and ended; None if it was killed or
            is still running.
        unsaved: whether the run has ended without saving: the steps after the last checkpoint are
            not saved. They are lost once a later start begins below them.
    """
    events = [valid_fields(event) for event in events]
    steps = [valid_fields(step) for step in steps]
    generations = read_generations(events, steps)
    commits = list(_named(events, "commit"))
    counted = _count_steps(generations, commits, steps)
    limits = find_limits(generations, last=counted["committed"] if unsaved else inf)
    productive = sum(
        generation.kept(limit) for generation, limit in zip(generations, limits, strict=True)
    )
    known = all(generation.observed for generation in generations)
    intervals = close_intervals(invocations, generations, events)
    elapsed = sum(max(0.0, ended - began) for began, ended in intervals)
    reached = counted["reached"] or 0
    ends = [each["metrics"] for each in _named(events, "done") if each.get("metrics")]
    return {
        "steps": counted,
        "notSaved": max(0, reached - counted["committed"]) if unsaved and known else 0,
        "ledgerGaps": _find_gaps(generations, steps) if known else [],
        "restarts": _count_restarts(generations),
        "recoverySeconds": [round(seconds, 3) for seconds in _recoveries(generations, events)],
        "productiveSeconds": round(productive, 3) if known else None,
        "elapsedSeconds": round(elapsed, 3),
        "goodput": round(min(productive / elapsed, 1.0), 4) if elapsed > 0 and known else None,
        "checkpoints": {
            **_sum_checkpoints(commits, events, elapsed),
            "atRiskSeconds": _sum_at_risk(steps, counted) if known else None,
        },
        "devices": next(
            (each["devices"] for each in reversed(events) if each.get("devices")), None
        ),
        "environments": list(_environments(events)),
        "tracker": next((each.get("url") for each in _named(reversed(events), "tracker")), None),
        "trackerBehind": bool(_said_last(events, "tracker-behind")),
        # of a script that has ended without a process group
        "separateRanks": _said_last(events, _SEPARATE).get("ranks"),
        "machineFaults": list_machine_faults(events),
        "loss": _last_loss(steps),
        "metrics": dict(ends[-1]) if ends else {},
    }


_ENVIRONMENT: Final = ("python", "torch", "kdist", "packages", "commit")


def _environments(events: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """What the first attempt, and each one since which that has changed, computed with."""
    for event in _named(events, "generation"):
        found = event.get("environment") or {}
        if texts := {name: str(found[name]) for name in _ENVIRONMENT if name in found}:
            yield {"sinceAttempt": event.get("generation"), **texts}


def _find_gaps(generations: Sequence[Generation], steps: Sequence[Record]) -> list[list[int]]:
    """The first and the last step of each gap: steps before the last one of which the ledger has no
    line, such as those that a full disk has refused.
    """
    first = min((generation.from_step for generation in generations), default=0)
    done = [(span.first, span.last) for span in overlay(read_spans(steps)) if span.last > first]
    return [
        [last + 1, following - 1]
        for (_, last), (following, _) in pairwise([(first, first), *done])
        if following > last + 1
    ]


def _count_steps(
    generations: Sequence[Generation], commits: Sequence[Record], steps: Sequence[Record]
) -> dict[str, Any]:
    limits = find_limits(generations)
    lost = sum(one.count_after(limit) for one, limit in zip(generations, limits, strict=True))
    known = all(generation.observed for generation in generations)
    reached = 0
    if generations:
        last = generations[-1]
        # of a script's steps the ledger knows those that were saved
        saved = [each.get("step", 0) for each in commits if each.get("time", 0.0) >= last.began]
        reached = max([last.reached, *saved])
    # positions count from 0
    samples = steps[-1]["last"] + 1 if steps and "last" in steps[-1] else None
    return {
        "reached": reached if known else reached or None,
        "committed": last_saved(commits),
        "lost": lost if known else None,
        "samples": samples,
    }


def _count_restarts(generations: Sequence[Generation]) -> dict[str, Any]:
    causes: Counter[str] = Counter()
    for generation in generations:
        if generation.reason == "failure":
            causes[(generation.previous_failure or {}).get("cause", "unknown")] += 1
    joins = sum(generation.reason == "join" for generation in generations)
    return {
        "total": sum(causes.values()),
        "byCause": dict(causes.most_common()),
        "joins": joins,
        "generations": len(generations),
    }


def _recoveries(generations: Sequence[Generation], events: Sequence[Record]) -> Iterator[float]:
    """Seconds from each failure to the next first step; failures in between count as one."""
    waiting: float | None = None
    for after in generations:
        if after.reason == "failure" and waiting is None:
            waiting = (after.previous_failure or {}).get("time", after.began)
        elif after.reason != "failure":
            waiting = None
        first = [
            event["time"]
            for event in _named(events, "first_step")
            if event.get("generation") == after.number and "time" in event
        ]
        if first and waiting is not None:
            yield max(0.0, first[0] - waiting)
            waiting = None


def last_step_times(generations: Iterable[Generation], events: Sequence[Record]) -> Iterator[float]:
    """The earliest Unix time at which each generation can have finished its last step. Only the
    first step has a time of its own.
    """
    firsts = {
        event.get("generation"): event["time"]
        for event in _named(events, "first_step")
        if "time" in event
    }
    for one in generations:
        if one.number in firsts:
            yield firsts[one.number] + sum_seconds(one.done) - one.first_seconds


def close_intervals(
    active: Sequence[tuple[float, float | None]],
    generations: Iterable[Generation],
    events: Sequence[Record],
) -> list[tuple[float, float]]:
    """When a run was running: what was killed, or still runs, ends with its last event or step."""
    stamps = (event["time"] for event in events if "time" in event)
    times = [*stamps, *last_step_times(generations, events)]
    found = []
    for index, (began, ended) in enumerate(active):
        following = active[index + 1][0] if index + 1 < len(active) else inf
        if ended is None:
            ended = max((time for time in times if began <= time < following), default=began)
        found.append((began, ended))
    return found


def _sum_at_risk(steps: Sequence[Record], counted: Mapping[str, Any]) -> float:
    """The time of the steps that are done and in no checkpoint."""
    spans = overlay(read_spans(steps))
    reached = sum_seconds(spans, counted["reached"] or 0)
    return round(reached - sum_seconds(spans, counted["committed"]), 3)


def _sum_checkpoints(
    commits: Sequence[Record], events: Sequence[Record], elapsed: float
) -> dict[str, Any]:
    # one line of a long run may stand for several commits
    written = sum(commit.get("written", commit.get("bytes", 0)) for commit in commits)
    return {
        "committed": sum(commit.get("commits", 1) for commit in commits),
        "fellBack": sum(1 for _ in _named(events, "fallback")),
        "seconds": round(sum(commit.get("seconds", 0.0) for commit in commits), 3),
        "visibleSeconds": round(sum(commit.get("visible_seconds", 0.0) for commit in commits), 3),
        "bytes": commits[-1].get("bytes") if commits else None,
        "lastTime": commits[-1].get("time") if commits else None,
        "bytesPerHour": round(written * 3600 / elapsed) if written and elapsed > 0 else None,
    }


def _last_loss(steps: Sequence[Record]) -> float | None:
    """Loss of the last step; the ledger stores it as `float.hex`, which is exact."""
    for line in reversed(steps):
        try:
            loss = float.fromhex(line["loss"])
        except (KeyError, TypeError, ValueError):
            continue
        return loss if isfinite(loss) else None
    return None


def recoveries(found: Sequence[float]) -> str:
    """How long recoveries took: of several their number, the median and the worst."""
    if len(found) == 1:
        return seconds(found[0])
    return f"{seconds(median(found))} (median of {number(len(found))}, worst {seconds(max(found))})"
