"""Recovery in place of models unlike `digits`: whatever a training consists of, the survivors keep
their processes, each step is done once, and the weights are those of the uninterrupted run.

`make chaos` takes as many random seeds as KDIST_SEEDS says (20); `.ci/run` one, drawn by the commit
or by KDIST_SEED.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.draw import read_commit
from tests.patience import soon

from .check_ledger import assert_every_sample_once, assert_repeats_are_equal
from .test_in_place import assert_nothing_was_repeated, wait_for_generation
from .training_run import Rank, TrainingRun, describe_job, kill

SEEDS = int(os.environ.get("KDIST_SEEDS", "20"))
DRAWN = random.Random(os.environ.get("KDIST_SEED") or read_commit(Path(__file__).parent)).randrange(
    SEEDS
)
BATCH, SAMPLES, EPOCHS = 48, 288, 16
STEPS = EPOCHS * SAMPLES // BATCH


class Cell(NamedTuple):
    """How a training is spread, and what it consists of."""

    nodes: int
    ranks: int
    train: dict[str, Any]


CELLS = {
    "norms": Cell(
        nodes=1,
        ranks=2,
        train={
            "options": {"norms": True},
            "microBatch": 12,
            "emaDecay": 0.98,
            "clipGradNorm": 1.0,
            "evaluateEverySteps": 10,
            "earlyStop": {"patience": 1000},
        },
    ),
    "buckets": Cell(
        nodes=1,
        ranks=3,
        train={
            "options": {"width": 520},
            "bucketMib": 1,
            "precision": "fp16",
            "clipGradNorm": 0.5,
            "schedule": {"name": "cosine", "warmupSteps": 5},
        },
    ),
    "stream": Cell(
        nodes=2,
        ranks=1,
        train={
            "options": {"norms": True, "stream": True},
            "virtualShards": 4,
            "loader": {"workers": 2},
            "onNonfinite": "skip",
            "optimizer": {"name": "sgd", "learningRate": 0.05},
        },
    ),
}
WIDE = {
    **CELLS,
    "square": Cell(
        nodes=2,
        ranks=2,
        train={
            "options": {"norms": True, "width": 520},
            "bucketMib": 1,
            "precision": "bf16",
            "emaDecay": 0.9,
        },
    ),
}
"""The cells of random faults."""


def describe(cell: Cell) -> dict[str, Any]:
    """The job of a cell."""
    options = {"length": SAMPLES, "pause": 0.01, **cell.train["options"]}
    length = {"steps": STEPS} if options.get("stream") else {"epochs": EPOCHS}
    train = {
        "workload": "varied:Varied",
        "globalBatch": BATCH,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 25}},
        **length,
        **cell.train,
        "options": options,
    }
    code = str(Path(__file__).parent / "code")
    return describe_job(
        "varied",
        nodes=cell.nodes,
        procsPerNode=cell.ranks,
        maxRestarts=1000,
        code=code,
        train=train,
    )


class Ending(NamedTuple):
    """What a run leaves."""

    weights: str
    metrics: dict[str, float]


def ending(run: TrainingRun) -> Ending:
    """What a run that is done has left; every sample was used once."""
    assert_nothing_was_repeated(run)
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)
    return Ending(run.done()["weights"], run.done()["metrics"])


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ending]:
    """The endings of runs without faults, as they are asked for."""
    endings: dict[str, Ending] = {}

    def find(name: str) -> Ending:
        if name not in endings:
            folder = tmp_path_factory.mktemp("uninterrupted")
            with TrainingRun(folder, describe(WIDE[name])) as run:
                assert run.wait() == 0, run.output()
            endings[name] = ending(run)
        return endings[name]

    return find


Place = tuple[str, int]
"""A rank's node and its number on the node."""


def places(run: TrainingRun) -> dict[Place, Rank]:
    """The live ranks by their places."""
    return {(rank.node, rank.number): rank for rank in run.ranks()}


def wait_for_step(
    run: TrainingRun, step: int, cell: Cell, *, may_end: bool = False
) -> dict[Place, int]:
    """The processes of all ranks once each trains and is in `step` or further; none if the run ends
    before, where it may.
    """
    size = cell.nodes * cell.ranks

    def are_there() -> dict[Place, int]:
        found = places(run)
        beats = [rank.beat for rank in found.values() if rank.beat.phase.name in ("STEP", "DATA")]
        ready = len(beats) == size and all(beat.step >= step for beat in beats)
        return {place: rank.pid for place, rank in found.items()} if ready else {}

    found: dict[Place, int] | bool = run.wait_until(
        lambda: are_there() or (may_end and run.has_ended()), f"step {step} of {size}", every=0.002
    )
    return {} if isinstance(found, bool) else found


def lose_one(run: TrainingRun, places: list[Place], before: dict[Place, int]) -> set[Place]:
    """Kill one rank."""
    kill(before[places[0]])
    return {places[0]}


def lose_two(run: TrainingRun, places: list[Place], before: dict[Place, int]) -> set[Place]:
    """Kill a rank, and its successor or another rank as soon as the next group forms."""
    kill(before[places[0]])
    if len(places) > 2:
        kill(before[places[1]])
        return set(places[:2])
    run.wait_until(lambda: len(set(pids(run)) - set(before.values())), "a successor", every=0.001)
    for pid in set(pids(run)) - set(before.values()):
        kill(pid)
    return {places[0]}


def lose_silently(run: TrainingRun, places: list[Place], before: dict[Place, int]) -> set[Place]:
    """Stop a rank, and kill it when the others wait for it."""
    os.kill(before[places[0]], signal.SIGSTOP)

    def wait() -> bool:
        return all(rank.beat.inside for rank in run.ranks() if rank.pid != before[places[0]])

    soon(wait)
    kill(before[places[0]])
    return {places[0]}


def pids(run: TrainingRun) -> list[int]:
    """The processes of the live ranks."""
    return [rank.pid for rank in run.ranks()]


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "norms",
        pytest.param("buckets", marks=[pytest.mark.chaos, pytest.mark.wide]),
        "stream",
    ],
)
def test_survivors_of_any_model_keep_their_processes_and_no_step_is_done_twice(
    name: str, uninterrupted: Callable[[str], Ending], tmp_path: Path
) -> None:
    cell = CELLS[name]
    with TrainingRun(tmp_path, describe(cell)) as run:
        order = list(wait_for_step(run, 2, cell))
        for step, first, lose in (
            (5, 1, lose_one),
            (20, 0, lose_one),
            (35, 1, lose_two),
            (50, 0, lose_silently),
        ):
            before = wait_for_step(run, step, cell)
            lost = lose(run, order[first:] + order[:first], before)
            after = wait_for_step(run, step + 3, cell)
            assert {place for place in order if before[place] != after[place]} == lost
        assert run.wait() == 0, run.output()
    assert ending(run) == uninterrupted(name)


class Fault(NamedTuple):
    """What happens to some of the ranks at about the same time."""

    spared: int
    """The rank that nothing happens to."""
    events: list[tuple[str, int, float]]
    """What, to which other rank, and the seconds before it."""


def plan_faults(seed: int, ranks: int) -> list[Fault]:
    """Four faults."""
    draw = random.Random(4000 + seed)
    return [
        Fault(
            draw.randrange(ranks),
            [
                (draw.choice(KINDS), draw.randrange(ranks - 1), round(draw.uniform(0, 0.7), 3))
                for _ in range(draw.randint(1, 4))
            ],
        )
        for _ in range(4)
    ]


KINDS = ("kill", "kill", "stop and kill", "stop and continue")


def inflict(run: TrainingRun, fault: Fault, order: list[Place], spared: int) -> None:
    """Carry out a fault."""
    victims = [place for number, place in enumerate(order) if number != fault.spared]
    for kind, victim, seconds in fault.events:
        time.sleep(seconds)
        rank = places(run).get(victims[victim])
        if rank is None or rank.pid == spared:
            continue
        with suppress(ProcessLookupError):  # its agent has replaced it meanwhile
            if kind.startswith("stop"):
                os.kill(rank.pid, signal.SIGSTOP)
                time.sleep(seconds / 2)
            os.kill(rank.pid, signal.SIGKILL if kind.endswith("kill") else signal.SIGCONT)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s == DRAWN else [pytest.mark.wide]) for s in range(SEEDS)]
)
def test_one_rank_that_is_spared_keeps_the_training_whatever_happens_to_the_others(
    seed: int, uninterrupted: Callable[[str], Ending], tmp_path: Path
) -> None:
    name = sorted(WIDE)[seed % len(WIDE)]
    cell = WIDE[name]
    with TrainingRun(tmp_path, describe(cell)) as run:
        order, step = list(wait_for_step(run, 2, cell)), 2
        for number, fault in enumerate(plan_faults(seed, len(order))):
            if step >= STEPS - 10:
                break  # the training ends
            before = wait_for_step(run, min(max(step, 4 + 14 * number), STEPS - 5), cell)
            spared = before[order[fault.spared]]
            inflict(run, fault, order, spared)
            run.wait_until(lambda: run.ranks() or run.has_ended(), "a rank in a group")
            step = max((rank.beat.step for rank in run.ranks()), default=step) + 2
            if not (after := wait_for_step(run, min(step, STEPS - 5), cell, may_end=True)):
                break
            assert after[order[fault.spared]] == spared, fault
        assert run.wait() == 0, run.output()
    assert ending(run) == uninterrupted(name)
    assert soon(lambda: not run.processes()), run.processes()


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
def test_a_node_that_wakes_alone_continues_from_a_newer_checkpoint(tmp_path: Path) -> None:
    train = {"steps": 100_000, "checkpoint": {"every": {"steps": 10}}, "options": {"norms": True}}
    job = describe(Cell(nodes=2, ranks=1, train=train))
    job["spec"]["nodes"] = {"min": 1, "max": 2}
    del job["spec"]["train"]["epochs"]
    with TrainingRun(tmp_path, job) as run:
        wait_for_generation(run, 1, world_size=2)
        asleep, lost = (
            [run.agents()[node], *(rank.pid for rank in run.ranks() if rank.node == node)]
            for node in ("node-1", "node-0")
        )
        run.process.send_signal(signal.SIGSTOP)  # nobody starts an agent again
        for pid in asleep:
            os.kill(pid, signal.SIGSTOP)
        wait_for_generation(run, 2, world_size=1)
        first = next(line["step"] for line in run.steps() if line["generation"] == 2)
        run.wait_until(
            lambda: any(e["step"] > first + 20 for e in run.events("commit")), "a checkpoint"
        )
        for pid in lost:
            kill(pid)
        committed = max(e["step"] for e in run.events("commit"))
        for pid in (*asleep, run.process.pid):
            os.kill(pid, signal.SIGCONT)
        run.wait_until(lambda: run.steps()[-1]["generation"] > 2, "a step of a later group")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    later = [line["step"] for line in run.steps() if line["generation"] > 2]
    assert later[0] > committed, "the node has gone on with the state that it had kept"
    assert_repeats_are_equal(run.steps())
