"""The agents' metrics in Prometheus' text format: parsed into samples, merged across pods, and
computed into the step time breakdown of each rank. Pure.

A slow rank makes the other ranks wait in the all-reduce, so its own all-reduces are the *shortest*.
It is found by its busy time: the step time without the time spent waiting.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?"
)
_LABEL = re.compile(r'\s*(?P<name>[a-zA-Z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@dataclass(frozen=True)
class Sample:
    """One number: the series' name, its labels, its value (which may be NaN)."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> Iterator[Sample]:
    """The samples in `text`; lines that are none are passed over, because they come from a pod."""
    for line in text.splitlines():
        found = None if line.startswith("#") else _match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        labels = {
            one["name"]: _plain(one["value"]) for one in _LABEL.finditer(found["labels"] or "")
        }
        yield Sample(found["name"], labels, value)


def merge(pages: Mapping[str, str], *, label: str = "pod") -> Iterator[str]:
    """The pages of several agents as one, line by line: each series gets a `label` that says whose
    it is.

    Help and type of a metric are said once, and its series stand together, as the format wants it.
    """
    comments: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for owner, page in pages.items():
        family = ""
        for line in page.splitlines():
            words = line.split(" ", 3)
            if line.startswith("# ") and len(words) > 2 and line.isprintable():
                family = words[2]
                known = comments.setdefault(family, [])
                if not any(one.split(" ", 3)[1] == words[1] for one in known):
                    known.append(line)
            elif found := _match(line):
                key = family if found["name"].startswith(family) and family else found["name"]
                series.setdefault(key, []).append(_with_label(found, label, owner))
    for family in dict.fromkeys([*comments, *series]):
        yield from comments.get(family, ())
        yield from series.get(family, ())


def _match(line: str) -> re.Match[str] | None:
    # what a pod sends may end up on a terminal
    return _LINE.fullmatch(line.strip()) if line.isprintable() else None


def _with_label(found: re.Match[str], label: str, owner: str) -> str:
    given = (found["labels"] or "").rstrip(",")
    return f'{found["name"]}{{{given}{"," if given else ""}{label}="{owner}"}} {found["value"]}'


def to_document(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """The samples for programs; values that JSON cannot hold are words."""
    return [
        {
            "name": sample.name,
            "labels": dict(sample.labels),
            "value": sample.value if math.isfinite(sample.value) else str(sample.value),
        }
        for sample in samples
    ]


def _plain(text: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found.group(), found.group()), text)


PHASES = ("data_wait", "forward", "backward", "comm_exposed", "optimizer", "other")
_BUSY = ("data_wait", "forward", "backward", "optimizer")
SLOW_BY = 1.3
"""A rank is slow when its busy time is so many times that of the ranks in the middle, as the alert
KdistStraggler has it.
"""
_LEAST_SECONDS = 0.0005  # below this a difference is noise


@dataclass(frozen=True)
class Counters:
    """Running sums of one rank: steps done, and seconds by phase, by kind of collective and in what
    is not a step.
    """

    steps: float = 0.0
    samples: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, float] = field(default_factory=dict)
    checkpoint: float = 0.0

    def since(self, before: Counters) -> Counters:
        """What came since `before`; all of it where the sums began anew."""
        if self.steps < before.steps:
            return self
        phases, collectives = (
            {name: max(0.0, sums[name] - earlier.get(name, 0.0)) for name in sums}
            for sums, earlier in (
                (self.phases, before.phases),
                (self.collectives, before.collectives),
            )
        )
        return Counters(
            self.steps - before.steps,
            self.samples - before.samples,
            phases,
            collectives,
            max(0.0, self.checkpoint - before.checkpoint),
        )


@dataclass(frozen=True)
class RankBreakdown:
    """One rank. Seconds are means per step over the time looked at; None where it did no step in
    it.
    """

    rank: int
    pod: str
    state: str = ""
    step: int | None = None
    silence: float | None = None
    steps: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, float] = field(default_factory=dict)
    """With a collective of each kind in flight."""
    checkpoint: float | None = None
    slow: bool = False

    @property
    def seconds(self) -> float | None:
        """Mean time of a step."""
        return sum(self.phases.values()) if self.phases else None

    @property
    def exchange(self) -> float | None:
        """Mean time of a step with a collective in flight; None where none was measured."""
        return sum(self.collectives.values()) if self.collectives else None

    @property
    def busy(self) -> float | None:
        """Mean time of a step in which the rank worked or read data, and did not wait for
        others.
        """
        return sum(self.phases.get(name, 0.0) for name in _BUSY) if self.phases else None

    def to_document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "rank": self.rank,
            "pod": self.pod,
            "state": self.state,
            "step": self.step,
            "stepSeconds": self.seconds,
            "busySeconds": self.busy,
            "phases": dict(self.phases),
            "allReduceSeconds": self.collectives.get("all_reduce"),
            "collectiveSeconds": dict(self.collectives),
            "checkpointSeconds": self.checkpoint,
            "heartbeatAgeSeconds": self.silence,
            "slow": self.slow,
        }


def count(samples: Iterable[Sample]) -> dict[int, Counters]:
    """The sums of each rank of one agent. What it knows of its first rank only (checkpoints) stands
    for all of its ranks.
    """
    steps: dict[int, float] = {}
    seen: dict[int, float] = defaultdict(float)
    phases: dict[int, dict[str, float]] = defaultdict(dict)
    collectives: dict[int, dict[str, float]] = defaultdict(dict)
    checkpoint = 0.0
    for sample in samples:
        if (
            sample.name == "kdist_wall_seconds_total"
            and sample.labels.get("category") == "checkpoint_save"
        ):
            checkpoint = sample.value
        rank = sample.labels.get("rank", "")
        if not rank.isdecimal():
            continue
        number = int(rank)
        if sample.name == "kdist_steps_total":
            steps[number] = sample.value
        elif sample.name == "kdist_samples_total":
            seen[number] = sample.value
        elif sample.name == "kdist_step_phase_seconds_total":
            phases[number][sample.labels.get("phase", "other")] = sample.value
        elif sample.name == "kdist_collective_seconds_total":
            collectives[number][sample.labels.get("op", "other")] = sample.value
    return {
        rank: Counters(done, seen[rank], phases[rank], collectives[rank], checkpoint)
        for rank, done in steps.items()
    }


def row(rank: int, pod: str, done: Counters, status: Mapping[str, Any]) -> RankBreakdown:
    """A rank over the time in which it counted `done`; `status` is its entry in the agent's
    `/status`.
    """
    steps = done.steps
    mean = {name: done.phases.get(name, 0.0) / steps for name in PHASES} if steps > 0 else {}
    return RankBreakdown(
        rank=rank,
        pod=pod,
        state=str(status.get("phase") or ""),
        step=_number(status, "step", int),
        silence=_number(status, "heartbeat_age", float),
        steps=steps,
        phases=mean,
        collectives={name: spent / steps for name, spent in done.collectives.items()}
        if steps > 0
        else {},
        checkpoint=done.checkpoint / steps if steps > 0 else None,
    )


def mark_slow(rows: Sequence[RankBreakdown]) -> list[RankBreakdown]:
    """The rows by rank, those marked whose busy time stands out: `SLOW_BY` times the (lower) median
    of all.
    """
    busy = sorted(one.busy for one in rows if one.busy is not None)
    middle = busy[(len(busy) - 1) // 2] if len(busy) > 1 else None
    ordered = sorted(rows, key=lambda one: (one.rank, one.pod))
    return [replace(one, slow=_stands_out(one.busy, middle)) for one in ordered]


def _stands_out(busy: float | None, middle: float | None) -> bool:
    if busy is None or middle is None:
        return False
    return busy > SLOW_BY * middle and busy - middle > _LEAST_SECONDS


def describe_slow(rows: Sequence[RankBreakdown]) -> Iterator[str]:
    """A sentence for each slow rank: how slow, and which part of its step it is that takes
    longer.
    """
    for one in rows:
        others = [other for other in rows if not other.slow and other.phases]
        if not one.slow or not others or one.busy is None:
            continue
        typical = sum(other.busy or 0.0 for other in others) / len(others)
        excess = {
            name: one.phases[name] - sum(other.phases[name] for other in others) / len(others)
            for name in _BUSY
        }
        most = max(excess, key=lambda name: excess[name]).replace("data_wait", "waiting for data")
        times = one.busy / typical if typical > 0 else float("inf")
        yield (
            f"rank {one.rank} on {one.pod} is slow: busy {times:.1f} times as long as the "
            f"others, most of it in {most}"
        )


def _number(document: Mapping[str, Any], name: str, kind: type) -> Any:
    value = document.get(name)
    return kind(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class AgentSample:
    """One agent's answers: its `/status` document, and its metrics as text. Empty where it did not
    answer.
    """

    status: Mapping[str, Any] = field(default_factory=dict)
    metrics: str = ""

    def samples(self) -> list[Sample]:
        """The metrics as samples."""
        return list(parse(self.metrics))

    @property
    def ranks(self) -> dict[int, Mapping[str, Any]]:
        """What `/status` says of each rank."""
        found = self.status.get("ranks")
        entries = (
            [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
        )
        return {one["rank"]: one for one in entries if isinstance(one.get("rank"), int)}


def breakdown_rows(
    now: Mapping[str, AgentSample], before: Mapping[str, AgentSample] | None = None
) -> list[RankBreakdown]:
    """One row per rank, over the time since `before`, or over the life of the agents. Ranks of the
    newest generation only.
    """
    newest = max((_generation(one) for one in now.values()), default=0)
    found = []
    for owner, reading in now.items():
        if _generation(reading) != newest:
            continue
        earlier = before.get(owner) if before else None
        old = count(earlier.samples()) if earlier and _generation(earlier) == newest else {}
        new = count(reading.samples())
        for rank in sorted({*new, *reading.ranks}):
            done = (
                new.get(rank, Counters()).since(old[rank])
                if rank in old
                else new.get(rank, Counters())
            )
            found.append(row(rank, owner, done, reading.ranks.get(rank, {})))
    return mark_slow(found)


def select(now: Mapping[str, AgentSample], rank: int) -> dict[str, AgentSample]:
    """The readings of the agent that has this rank."""
    return {owner: reading for owner, reading in now.items() if rank in reading.ranks}


def first(now: Mapping[str, AgentSample], name: str) -> Any:
    """What the agents say of the job under this name: the one with rank 0 first, then any that
    knows it.
    """
    ordered = sorted(now.values(), key=lambda reading: min(reading.ranks, default=1 << 30))
    return next(
        (reading.status[name] for reading in ordered if reading.status.get(name) is not None), None
    )


def samples_per_second(now: Mapping[str, AgentSample]) -> float | None:
    """Of the whole job: each agent says what its own ranks do."""
    rates = [
        rate
        for one in now.values()
        if isinstance(rate := one.status.get("samples_per_second"), int | float)
    ]
    return sum(rates) if rates else None


def _generation(reading: AgentSample) -> int:
    found = reading.status.get("generation")
    return found if isinstance(found, int) else 0
