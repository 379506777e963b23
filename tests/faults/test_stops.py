"""A run that is asked to stop saves the step that it has finished, at whatever moment, as long as a
rank lives that holds it; otherwise it says how many steps are not saved.

One rank of three is killed between two steps, so that one of the others is a step ahead and one
behind. A rank waits at a line of the recovery until the request to stop has come.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kdist_trainer.distributed.world import World
from kdist_trainer.training import regroup, trainer

from .code.varied import find_point
from .test_crash_points import RANKS, describe, order, orders
from .training_run import TrainingRun, kill

__all__ = ["orders"]
pytestmark = [pytest.mark.processes, pytest.mark.chaos, pytest.mark.sampled]


class Moment(NamedTuple):
    """Which rank is where when the request comes."""

    role: str
    """As in `varied`: `ahead`, `behind` or `newcomer` in a recovery; empty in training."""
    function: Callable[..., Any]
    text: str
    """Of the line."""
    can_tell: bool = True
    """Whether the agent says at once that it was asked."""


MOMENTS = {
    "a save is in progress": Moment("", trainer.save, "stats.add_wall"),
    "a survivor leaves": Moment("ahead", regroup.keep, "ctx.buffers.restore()", can_tell=False),
    "a survivor connects": Moment("ahead", World._open, "group_abort.reset()"),
    "a newcomer is built": Moment("newcomer", regroup.plan_handover, "made ="),
    "ranks agree on a state": Moment("behind", regroup.plan_handover, "made ="),
    "a survivor takes over": Moment("ahead", regroup.take_over, "peers:"),
    "values are sent": Moment("behind", regroup.receive_state, "broadcast_state"),
    "a newcomer seeks its data": Moment("newcomer", trainer.setup, "seek_data(ctx)"),
}
SAVES_NEVER: dict[str, Any] = {"checkpoint": {"every": {"steps": 1_000_000}}}


def all_step_past(run: TrainingRun, step: int) -> bool:
    beats = [rank.beat for rank in run.ranks() if rank.beat.phase.name in ("STEP", "DATA")]
    return len(beats) == RANKS and all(beat.step > step for beat in beats)


def assert_all_is_saved(run: TrainingRun) -> None:
    """The last finished step is in the newest checkpoint."""
    assert run.wait() == 11, run.output()
    assert run.events("commit"), run.output()
    assert run.events("commit")[-1]["step"] == run.steps()[-1]["step"]
    assert run.report()["notSaved"] == 0
    assert "not saved" not in run.output()
    assert run.report()["steps"]["lost"] == 0


@pytest.mark.parametrize("name", MOMENTS)
def test_a_run_that_is_asked_to_stop_saves_what_a_rank_holds_when(
    name: str, orders: Path, tmp_path: Path
) -> None:
    moment = MOMENTS[name]
    train = SAVES_NEVER if moment.role else {"checkpoint": {"every": {"steps": 20}}}
    with TrainingRun(tmp_path, describe(100_000, orders=str(orders), train=train)) as run:
        run.wait_until(lambda: all_step_past(run, 3), "all ranks to train", every=0.005)
        point = find_point(moment.function, moment.text)
        order(orders, "crash.json", {"role": moment.role, "point": point, "until": "go"})
        if moment.role:
            order(orders, "split.json", {"victim": 2, "behind": [1]})
        run.wait_until(lambda: (orders / "crashed").exists(), f"a rank at {point}")
        run.process.send_signal(signal.SIGTERM)
        if moment.can_tell:
            run.wait_until(lambda: has_heard(run), "the agent that was asked")
        (orders / "go").touch()
        assert_all_is_saved(run)


def has_heard(run: TrainingRun) -> bool:
    """Whether the agent has forwarded the request."""
    return any(event["event"] == "stopping" for event in run.log("node-0"))


def test_a_run_that_is_asked_to_stop_while_it_trains_saves_its_step(
    orders: Path, tmp_path: Path
) -> None:
    job = describe(100_000, orders=str(orders), train=SAVES_NEVER)
    with TrainingRun(tmp_path, job) as run:
        run.wait_until(lambda: all_step_past(run, 3), "all ranks to train")
        run.process.send_signal(signal.SIGTERM)
        assert_all_is_saved(run)


@pytest.mark.parametrize("every", [1, 4])
def test_a_run_that_saves_at_every_exchange_of_its_ranks_hears_that_it_is_to_stop(
    every: int, orders: Path, tmp_path: Path
) -> None:
    train = {"checkpoint": {"every": {"steps": every}}, "syncEverySteps": 4}
    with TrainingRun(tmp_path, describe(100_000, orders=str(orders), train=train)) as run:
        run.wait_until(lambda: run.steps() and run.steps()[-1]["step"] > 60, "steps")
        run.process.send_signal(signal.SIGTERM)
        assert_all_is_saved(run)


def test_a_run_that_is_asked_to_stop_once_all_its_ranks_are_lost_says_so(
    orders: Path, tmp_path: Path
) -> None:
    job = describe(100_000, orders=str(orders), train=SAVES_NEVER)
    with TrainingRun(tmp_path, job) as run:
        run.wait_until(lambda: run.steps() and run.steps()[-1]["step"] > 20, "steps")
        point = find_point(trainer.setup, "seek_data(ctx)")
        order(orders, "crash.json", {"role": "newcomer", "point": point, "until": "go"})
        for rank in run.ranks():
            kill(rank.pid)
        run.wait_until(lambda: (orders / "crashed").exists(), "the start of other ranks")
        reached = run.steps()[-1]["step"]
        run.process.send_signal(signal.SIGTERM)
        run.wait_until(lambda: has_heard(run), "the agent that was asked")
        (orders / "go").touch()
        run.wait()
        saved = max((one["step"] for one in run.events("commit")), default=0)
        assert saved < reached
        lost, unsaved = run.report()["steps"]["lost"], run.report()["notSaved"]
        assert lost + unsaved > 0, run.output()
