"""Times one case over many rounds. A round lasts from the moment all ranks are ready until the last one has its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from kdist_trainer.bench.cases import Case, Collective
from kdist_trainer.world import World

LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Effort:
    """How long one size is measured: `rounds` of it, or fewer where these would take more than `seconds`."""

    rounds: int = 20
    warmup: int = 5
    seconds: float = 5.0


@dataclass(frozen=True)
class Row:
    """One size, measured: the same on every rank. Times in seconds, bandwidths in bytes per second, None without bytes."""

    size: int
    rounds: int
    mean: float
    fastest: float
    p50: float
    p90: float
    p99: float
    algbw: float | None
    busbw: float | None
    wrong: int
    """Elements over all ranks and rounds that were not what they had to be."""


def sizes(least: int, most: int, factor: int) -> list[int]:
    """The ladder: `least`, and each `factor` times the one before it, up to `most`."""
    found = [least]
    while found[-1] * factor <= most:
        found.append(found[-1] * factor)
    return found


def measure(collective: Collective, size: int, world: World, effort: Effort, *, beat: Callable[[], object]) -> Row:
    """Measure one size; `beat` is called in every round. Collective."""
    case = collective.make(world, size)
    first = [_round(case, world)[0] for _ in range(max(1, effort.warmup))]
    rounds = _agree_on_rounds(min(first), world, effort)
    own, wrong = [], 0
    for _ in range(rounds):
        beat()
        seconds, mistakes = _round(case, world)
        own.append(seconds)
        wrong += mistakes
    table = torch.tensor([*own, float(wrong)], dtype=torch.float64)
    everyone = [torch.empty_like(table) for _ in range(world.size)]
    dist.all_gather(everyone, table)
    stacked = torch.stack(everyone)
    return summarize(stacked[:, :-1].max(dim=0).values, case.nbytes, collective.factor(world.size), int(stacked[:, -1].sum()))


def summarize(times: torch.Tensor, nbytes: int, factor: float, wrong: int) -> Row:
    """A row of the rounds' times: bandwidth from the mean as nccl-tests has it, percentiles of single rounds."""
    mean = float(times.mean())
    p50, p90, p99 = (float(torch.quantile(times, share)) for share in (0.5, 0.9, 0.99))
    algbw = nbytes / mean if nbytes else None
    busbw = None if algbw is None else algbw * factor
    return Row(nbytes, len(times), mean, float(times.min()), p50, p90, p99, algbw, busbw, wrong)


def _round(case: Case, world: World) -> tuple[float, int]:
    """Seconds and mistakes of one round on this rank."""
    case.reset()
    finish(world)
    dist.barrier()
    finish(world)
    begun = perf_counter()
    case.run()
    finish(world)
    return perf_counter() - begun, case.count_wrong()


def finish(world: World) -> None:
    """Wait until the device has done what it was given."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _agree_on_rounds(seconds: float, world: World, effort: Effort) -> int:
    """As many rounds as fit into the time, by rank 0's clock."""
    fitting = int(effort.seconds / max(seconds, 1e-6))
    rounds: int = world.broadcast_object(max(LEAST_ROUNDS, min(effort.rounds, fitting)))
    return rounds
