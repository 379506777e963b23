"""Recovery in place holds at every line of its own code: a rank that is killed there leaves the
others able to go on, with no step lost as long as one of them has the newest state.

One rank of three is killed between two steps, so that one of the others is a step ahead and one
behind. While they form the next group, one of the three is killed at a line of that code. `make
chaos` takes all lines; CI draws a few, by the commit or by KDIST_SEED.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kdist_trainer.training import evaluation, regroup, trainer
from kdist_trainer.training.checkpointing import TrainerCheckpointing
from tests.draw import read_commit

from .check_ledger import assert_every_sample_once, assert_repeats_are_equal
from .code.varied import POINTS, find_point
from .test_in_place import assert_nothing_was_repeated
from .training_run import TrainingRun, describe_job

BATCH, RANKS = 24, 3
DRAWN_CRASHES = 4
STEPS_OF_A_CRASH = 14
DRAWN = random.Random(os.environ.get("KDIST_SEED") or read_commit(Path(__file__).parent))


class Case(NamedTuple):
    """Who dies first, who is then a step behind, and who dies while the group forms again."""

    victim: int
    behind: int
    role: str


CASES = [
    Case(victim, behind, role)
    for victim, behind in ((2, 1), (0, 2))
    for role in ("behind", "newcomer", "ahead")
]


def describe(steps: int, *, train: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The job; the folder of the orders is among the options."""
    settings = {
        "workload": "varied:Varied",
        "options": {"norms": True, "length": BATCH * 10, "pause": 0.005, **options},
        "steps": steps,
        "globalBatch": BATCH,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 40}},
        **(train or {}),
    }
    spec: dict[str, Any] = {
        "procsPerNode": RANKS,
        "maxRestarts": 1000,
        "code": str(Path(__file__).parent / "code"),
    }
    return describe_job("crashes", nodes=1, train=settings, **spec)


def run_uninterrupted(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What DONE says after a run without crashes."""
    with TrainingRun(folder / "uninterrupted", job) as run:
        assert run.wait() == 0, run.output()
    return run.done()


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """The folder in which ranks look for orders."""
    folder = tmp_path / "orders"
    folder.mkdir()
    return folder


def order(orders: Path, name: str, document: dict[str, Any]) -> None:
    """Put an order where the ranks look for it, in one write."""
    (orders / "new").write_text(json.dumps(document))
    (orders / "new").replace(orders / name)


def crash(run: TrainingRun, orders: Path, case: Case, point: str) -> bool:
    """Carry out one crash; returns whether a rank came to that line in that role."""

    def all_step_past(step: int) -> bool:
        beats = [rank.beat for rank in run.ranks() if rank.beat.phase.name in ("STEP", "DATA")]
        return len(beats) == RANKS and all(beat.step > step for beat in beats)

    run.wait_until(lambda: all_step_past(1), "all ranks to train", every=0.005)
    before = {rank.pid for rank in run.ranks()}
    (orders / "crashed").unlink(missing_ok=True)
    order(orders, "crash.json", {"role": case.role, "point": point})
    order(orders, "split.json", {"victim": case.victim, "behind": [case.behind]})
    run.wait_until(lambda: not (orders / "split.json").exists(), f"{case}, {point}", every=0.005)
    step = max(rank.beat.step for rank in run.ranks())
    run.wait_until(lambda: all_step_past(step + 1), f"a step after {case}, {point}", every=0.005)
    has_crashed = (orders / "crashed").exists()
    kept = before & {rank.pid for rank in run.ranks()}
    lost = 1 + (has_crashed and case.role != "newcomer")
    assert len(kept) == RANKS - lost, f"{case}, {point}: {len(kept)} ranks kept their process"
    return has_crashed


def check(run: TrainingRun, done: dict[str, Any], *, may_repeat: int = 0) -> None:
    """The run has ended as the uninterrupted one, with at most so many steps done twice."""
    if may_repeat:
        assert assert_repeats_are_equal(run.steps()) <= may_repeat
    else:
        assert_nothing_was_repeated(run)
    assert_every_sample_once(run.steps(), total=done["samples_seen"])
    assert run.done()["step"] == done["step"]
    assert run.done()["weights"] == done["weights"]
    assert run.done()["metrics"] == done["metrics"]


@pytest.mark.sampled
@pytest.mark.processes
def test_no_step_is_lost_if_a_rank_dies_at_a_line_of_the_recovery(
    orders: Path, tmp_path: Path
) -> None:
    steps = DRAWN_CRASHES * STEPS_OF_A_CRASH
    with TrainingRun(tmp_path, describe(steps, orders=str(orders))) as run:
        for _ in range(DRAWN_CRASHES):
            case = DRAWN.choice([case for case in CASES if case.role != "ahead"])
            crash(run, orders, case, DRAWN.choice(POINTS))
        assert run.wait() == 0, run.output()
    check(run, run_uninterrupted(tmp_path, describe(steps)))


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.role}-{case.victim}")
def test_no_step_is_lost_wherever_a_rank_dies_in_the_recovery(
    case: Case, orders: Path, tmp_path: Path
) -> None:
    steps = len(POINTS) * STEPS_OF_A_CRASH
    with TrainingRun(tmp_path, describe(steps, orders=str(orders))) as run:
        happened = [point for point in POINTS if crash(run, orders, case, point)]
        assert run.wait(600) == 0, run.output()
    assert len(happened) > len(POINTS) // 4, happened  # so the orders are followed at all
    done = run_uninterrupted(tmp_path, describe(steps))
    check(run, done, may_repeat=len(happened) if case.role == "ahead" else 0)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("behind", "dies"),
    [
        ([1, 2], False),
        pytest.param([1], False, marks=pytest.mark.chaos),
        pytest.param([1], True, marks=pytest.mark.chaos),
    ],
    ids=["all", "one", "alone"],
)
def test_a_rank_that_is_lost_in_the_first_step_leaves_no_trace_in_the_optimizer(
    behind: list[int], dies: bool, orders: Path, tmp_path: Path
) -> None:
    order(orders, "split.json", {"step": 1, "victim": 0, "behind": behind})
    if dies:  # the only one that has done the step, while it sends its state
        point = find_point(regroup.receive_state, "broadcast_state(")
        order(orders, "crash.json", {"role": "ahead", "point": point})
    with TrainingRun(tmp_path, describe(12, orders=str(orders))) as run:
        assert run.wait() == 0, run.output()
    assert not (orders / "split.json").exists()
    assert (orders / "crashed").exists() == dies
    check(run, run_uninterrupted(tmp_path, describe(12)), may_repeat=int(dies))


@pytest.mark.sampled
@pytest.mark.processes
def test_a_state_that_was_received_is_continued_with_though_its_sender_is_lost(
    orders: Path, tmp_path: Path
) -> None:
    """Rank 0 is a step behind, and evaluates moving averages that it has received."""
    train = {"emaDecay": 0.5, "evaluate": "end"}
    order(orders, "split.json", {"step": 5, "victim": 1, "behind": [0]})
    point = find_point(regroup.take_over, "held_values(ctx), own)")
    order(orders, "crash.json", {"role": "ahead", "point": point})
    with TrainingRun(tmp_path, describe(12, train=train, orders=str(orders))) as run:
        assert run.wait() == 0, run.output()
    assert (orders / "crashed").exists()
    check(run, run_uninterrupted(tmp_path, describe(12, train=train)))


@pytest.mark.sampled
@pytest.mark.processes
def test_ranks_that_went_back_to_a_checkpoint_in_place_hold_the_same(
    orders: Path, tmp_path: Path
) -> None:
    """A buffer that no checkpoint has too: one rank has trained before, another one is new."""
    train = {"checkpoint": {"every": {"steps": 5}}}
    order(orders, "split.json", {"step": 15, "victim": 1, "behind": []})
    point = find_point(trainer.seek_data, "ctx.buffers.track_constants()")
    order(orders, "crash.json", {"role": "ahead", "point": point})
    with TrainingRun(tmp_path, describe(20, train=train, late=13, orders=str(orders))) as run:
        assert run.wait() == 0, run.output()
        why = [one["why"] for one in run.log("node-0") if one["event"] == "recovery-restarts"]
    assert (orders / "crashed").exists()
    assert len(why) == 1, why
    assert "changed for the first time" in why[0]


@pytest.mark.sampled
@pytest.mark.processes
def test_the_steps_before_a_save_that_loses_a_rank_are_in_the_ledger(
    orders: Path, tmp_path: Path
) -> None:
    train = {"checkpoint": {"every": {"steps": 10}}}
    order(orders, "split.json", {"step": 10, "victim": 1, "behind": []})
    with TrainingRun(tmp_path, describe(20, train=train, orders=str(orders))) as run:
        assert run.wait() == 0, run.output()
    assert not (orders / "split.json").exists()
    assert_nothing_was_repeated(run)
    assert_every_sample_once(run.steps(), total=20 * BATCH)


@pytest.mark.sampled
@pytest.mark.processes
def test_an_evaluation_that_loses_a_rank_is_done_again_and_counts(
    orders: Path, tmp_path: Path
) -> None:
    stop = {"patience": 1, "minDelta": 1e9}  # so the second evaluation ends the run
    train = {"evaluateEverySteps": 10, "earlyStop": stop}
    point = find_point(evaluation.evaluate, "world = ctx.world")
    order(orders, "crash.json", {"role": "", "point": point})
    with TrainingRun(tmp_path, describe(60, train=train, orders=str(orders))) as run:
        assert run.wait() == 0, run.output()
    assert (orders / "crashed").exists()
    done = run_uninterrupted(tmp_path, describe(60, train=train))
    assert done["step"] == 20
    check(run, done)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
def test_a_rollback_that_loses_a_rank_ends_as_one_that_does_not(
    orders: Path, tmp_path: Path
) -> None:
    train = {"onNonfinite": "rollback", "checkpoint": {"every": {"steps": 3}}}
    # without the buffer that no checkpoint holds: a rollback does not restore it
    options = {"norms": False, "poison": 7}
    job = describe(40, train=train, orders=str(orders), **options)
    order(orders, "split.json", {"step": 4, "victim": 1, "behind": [2]})
    with TrainingRun(tmp_path, job) as run:
        for point in (
            find_point(TrainerCheckpointing.restore, "self.manager.load("),
            find_point(trainer.seek_data, "ctx.buffers.track_constants()"),
        ):
            (orders / "crashed").unlink(missing_ok=True)
            order(orders, "crash.json", {"role": "", "point": point})
            run.wait_until((orders / "crashed").exists, f"a rollback that comes to {point}")
        assert run.wait() == 0, run.output()
    check(run, run_uninterrupted(tmp_path, describe(40, train=train, **options)), may_repeat=40)
