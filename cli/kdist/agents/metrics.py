"""The agents' metrics: parsed from Prometheus' text format, merged across pods, and computed into
the step time breakdown of each rank. Performs no I/O.

A slow rank makes the other ranks wait in the all-reduce, so its own all-reduces are the *shortest*.
It is found by its busy time: the step time without the time spent waiting for other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kdist.status import documents

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.samples import Sample


def parse(text: str) -> Iterator[Sample]:
    """Yield the samples of one page, in its order.

    Lines with control characters are skipped, because a pod's text may be printed to a terminal.
    Parsing stops at the first malformed line.
    """
    for family in _families(text):
        yield from family.samples


def _families(text: str) -> Iterator[Metric]:
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.samples import Sample

    printable = "\n".join(line for line in text.splitlines() if line.isprintable())
    try:
        for family in text_string_to_metric_families(printable):
            # the parser returns integers of any size as int
            family.samples = [
                Sample(sample.name, sample.labels, float(sample.value)) for sample in family.samples
            ]
            yield family
    except (ValueError, IndexError, OverflowError):  # what the parser raises for malformed text
        return


def merge(pages: Mapping[str, str], *, label: str = "pod") -> list[str]:
    """Merge the pages of several agents, by pod, into the lines of one: help and type of a metric
    once, its series together, each with the name of its pod in `label`.
    """
    from prometheus_client import Metric, generate_latest
    from prometheus_client.registry import Collector

    families: dict[str, Metric] = {}
    for pod, page in pages.items():
        for family in _families(page):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            merged.samples += [
                sample._replace(labels={**sample.labels, label: pod}) for sample in family.samples
            ]

    class Merged(Collector):
        def collect(self) -> Iterable[Metric]:
            return families.values()

    return generate_latest(Merged()).decode().splitlines()


PHASES = ("data_wait", "forward", "backward", "comm_exposed", "optimizer", "other")
STRAGGLER_RATIO = 1.3
"""A rank is slow when it is busy this many times as long as the median rank; `make generate` writes
it into the alert KdistStraggler and the dashboards.
"""
MAX_HEARTBEAT_AGE = 10.0
"""Seconds without a heartbeat, after which the views mark a rank as silent."""
BUSY_PHASES = ("data_wait", "forward", "backward", "optimizer")
_MIN_EXCESS_SECONDS = 0.0005  # a smaller difference is noise


@dataclass(frozen=True)
class Counters:
    """Cumulative counters of one rank: steps, samples, and seconds by phase, by collective and in
    checkpoint saves.
    """

    steps: float = 0.0
    samples: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, float] = field(default_factory=dict)
    checkpoint: float = 0.0

    def since(self, before: Counters) -> Counters:
        """The increase since `before`; all of it if the counters were reset in between."""
        if self.steps < before.steps:
            return self
        return Counters(
            self.steps - before.steps,
            self.samples - before.samples,
            _increase(self.phases, before.phases),
            _increase(self.collectives, before.collectives),
            max(0.0, self.checkpoint - before.checkpoint),
        )


def _increase(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, value - before.get(name, 0.0)) for name, value in now.items()}


@dataclass(frozen=True)
class RankBreakdown:
    """The step time of one rank: mean seconds per step over an interval, None if the rank completed
    no step in it.
    """

    rank: int
    pod: str
    state: str = ""
    step: int | None = None
    heartbeat_age: float | None = None
    """Seconds since the rank's last heartbeat."""
    steps: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, float] = field(default_factory=dict)
    """Seconds with a collective of each kind in flight."""
    checkpoint: float | None = None
    slow: bool = False
    reported_seconds: float | None = None
    """The time of a step that the rank reports, where its parts were not measured."""

    @property
    def step_seconds(self) -> float | None:
        return sum(self.phases.values()) if self.phases else self.reported_seconds

    @property
    def collective_seconds(self) -> float | None:
        """Mean time per step with a collective in flight; None if none was measured."""
        return sum(self.collectives.values()) if self.collectives else None

    @property
    def busy_seconds(self) -> float | None:
        """Mean time per step in which the rank computed or read data, without waits for others."""
        if not self.phases:
            return None
        return sum(self.phases.get(name, 0.0) for name in BUSY_PHASES)

    def to_document(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pod": self.pod,
            "state": self.state,
            "step": self.step,
            "stepSeconds": self.step_seconds,
            "busySeconds": self.busy_seconds,
            "phases": dict(self.phases),
            "allReduceSeconds": self.collectives.get("all_reduce"),
            "collectiveSeconds": dict(self.collectives),
            "checkpointSeconds": self.checkpoint,
            "heartbeatAgeSeconds": self.heartbeat_age,
            "slow": self.slow,
        }


def counters_by_rank(samples: Iterable[Sample]) -> dict[int, Counters]:
    """The counters of each rank of one agent. Time in checkpoint saves is measured on the agent's
    first rank only and stands for all of its ranks.
    """
    steps: dict[int, float] = {}
    consumed: dict[int, float] = defaultdict(float)
    phases: dict[int, dict[str, float]] = defaultdict(dict)
    collectives: dict[int, dict[str, float]] = defaultdict(dict)
    checkpoint = 0.0
    for sample in samples:
        labels = sample.labels
        if (
            sample.name == "kdist_wall_seconds_total"
            and labels.get("category") == "checkpoint_save"
        ):
            checkpoint = sample.value
        if not labels.get("rank", "").isdecimal():
            continue
        rank = int(labels["rank"])
        if sample.name == "kdist_steps_total":
            steps[rank] = sample.value
        elif sample.name == "kdist_samples_total":
            consumed[rank] = sample.value
        elif sample.name == "kdist_step_phase_seconds_total":
            phases[rank][labels.get("phase", "other")] = sample.value
        elif sample.name == "kdist_collective_seconds_total":
            collectives[rank][labels.get("op", "other")] = sample.value
    return {
        rank: Counters(count, consumed[rank], phases[rank], collectives[rank], checkpoint)
        for rank, count in steps.items()
    }


def rank_breakdown(
    rank: int, pod: str, increase: Counters, status: Mapping[str, Any]
) -> RankBreakdown:
    """The step time of one rank, from the increase of its counters and its entry in `/status`."""
    found = RankBreakdown(
        rank=rank,
        pod=pod,
        state=str(status.get("phase") or ""),
        step=documents.integer(status, "step"),
        heartbeat_age=documents.number(status, "heartbeat_age"),
        steps=increase.steps,
        reported_seconds=documents.number(status, "step_seconds"),
    )
    if increase.steps <= 0:
        return found
    if not any(increase.phases.values()):  # a script, which measures none
        measured = any(increase.collectives.values())
        collectives = increase.collectives if measured else {}
        return replace(
            found,
            collectives={name: total / increase.steps for name, total in collectives.items()},
            checkpoint=increase.checkpoint / increase.steps if increase.checkpoint else None,
        )
    return replace(
        found,
        phases={name: increase.phases.get(name, 0.0) / increase.steps for name in PHASES},
        collectives={name: each / increase.steps for name, each in increase.collectives.items()},
        checkpoint=increase.checkpoint / increase.steps,
    )


def mark_slow(rows: Sequence[RankBreakdown]) -> list[RankBreakdown]:
    """Sort the rows by rank, and mark the ranks that are busy `STRAGGLER_RATIO` times as long as
    the (lower) median.
    """
    busy = sorted(row.busy_seconds for row in rows if row.busy_seconds is not None)
    median = busy[(len(busy) - 1) // 2] if len(busy) > 1 else None
    ordered = sorted(rows, key=lambda row: (row.rank, row.pod))
    if median is None:
        return [replace(row, slow=False) for row in ordered]
    limit = max(STRAGGLER_RATIO * median, median + _MIN_EXCESS_SECONDS)
    return [replace(row, slow=(row.busy_seconds or 0.0) > limit) for row in ordered]


def describe_slow(rows: Sequence[RankBreakdown]) -> Iterator[str]:
    """Yield a sentence for each slow rank: how slow it is, and which phase of its step takes
    longer than on the other ranks.
    """
    others = [row for row in rows if not row.slow and row.phases]
    if not others:
        return
    typical = sum(row.busy_seconds or 0.0 for row in others) / len(others)
    for row in rows:
        if not row.slow or row.busy_seconds is None:
            continue
        excess = {
            name: row.phases[name] - sum(other.phases[name] for other in others) / len(others)
            for name in BUSY_PHASES
        }
        most = max(excess, key=lambda name: excess[name]).replace("data_wait", "waiting for data")
        ratio = row.busy_seconds / typical if typical > 0 else float("inf")
        yield (
            f"rank {row.rank} on {row.pod} is slow: busy {ratio:.1f} times as long as the "
            f"others, most of it in {most}"
        )


@dataclass(frozen=True)
class AgentSample:
    """What one agent answered: its `/status` document, and its metrics as text; empty if it did not
    answer.
    """

    status: Mapping[str, Any] = field(default_factory=dict)
    metrics: str = ""

    @cached_property
    def counters(self) -> dict[int, Counters]:
        return counters_by_rank(parse(self.metrics))

    @property
    def ranks(self) -> dict[int, Mapping[str, Any]]:
        found = self.status.get("ranks")
        entries = found if isinstance(found, list) else []
        ranked = (each for each in entries if isinstance(each, Mapping))
        return {each["rank"]: each for each in ranked if isinstance(each.get("rank"), int)}

    @property
    def generation(self) -> int:
        """The generation of the agent's worker group; 0 if unknown."""
        found = self.status.get("generation")
        return found if isinstance(found, int) else 0


def breakdown_rows(
    now: Mapping[str, AgentSample], before: Mapping[str, AgentSample] | None = None
) -> list[RankBreakdown]:
    """One row per rank of the newest generation, from the latest sample of each agent by the name
    of its pod. The rows cover the time since `before`; without it, the whole life of the agents.
    """
    newest = max((agent.generation for agent in now.values()), default=0)
    rows = []
    for pod, agent in now.items():
        if agent.generation != newest:
            continue
        previous = before.get(pod) if before else None
        old = previous.counters if previous and previous.generation == newest else {}
        for rank in sorted({*agent.counters, *agent.ranks}):
            increase = agent.counters.get(rank, Counters())
            if rank in old:
                increase = increase.since(old[rank])
            rows.append(rank_breakdown(rank, pod, increase, agent.ranks.get(rank, {})))
    return mark_slow(rows)


def select(now: Mapping[str, AgentSample], rank: int | None) -> dict[str, AgentSample]:
    """The samples of the agent that runs this rank; of all agents if `rank` is None."""
    return {owner: sample for owner, sample in now.items() if rank is None or rank in sample.ranks}


def select_rows(rows: Sequence[RankBreakdown], rank: int | None) -> list[RankBreakdown]:
    """The rows of this rank; all rows if `rank` is None."""
    return [row for row in rows if rank is None or row.rank == rank]


def merge_samples(now: Mapping[str, AgentSample]) -> list[str]:
    """The metrics of all agents in Prometheus' text format, each series with the label `pod`."""
    return merge({owner: sample.metrics for owner, sample in now.items()})


def first(now: Mapping[str, AgentSample], name: str) -> Any:
    """A field of the agents' `/status`: of rank 0's agent, else of any that knows it."""
    ordered = sorted(now.values(), key=lambda agent: min(agent.ranks, default=1 << 30))
    return next(
        (agent.status[name] for agent in ordered if agent.status.get(name) is not None), None
    )


def samples_per_second(now: Mapping[str, AgentSample]) -> float | None:
    """Throughput of the whole job: the sum over its agents; None if no agent knows it."""
    rates = [
        rate
        for agent in now.values()
        if isinstance(rate := agent.status.get("samples_per_second"), int | float)
    ]
    return sum(rates) if rates else None
