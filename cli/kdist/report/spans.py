"""Successive steps of a generation as one span, and which spans count where steps were done again.

A record of the ledger stands for one step, or, with `steps`, for the steps up to its own
(`kdist_trainer.step_lines`). Where a span has to be divided, its seconds are, evenly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any


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
        """How many."""
        return self.last - self.first + 1

    def within(self, first: int, last: float) -> Span | None:
        """The part between two steps; None if there is none."""
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
            line["step"] - _count(line) + 1,
            line["step"],
            float(line.get("seconds", 0.0)),
            float(line.get("wait_seconds", 0.0)),
            line.get("loss"),
            line["step"],
        )
        for line in steps
        if "generation" in line and "step" in line
    ]


def _count(line: Mapping[str, Any]) -> int:
    steps: int = min(line.get("steps", 1), line["step"])
    return max(1, steps)


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
