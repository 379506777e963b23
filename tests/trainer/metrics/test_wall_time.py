"""The wall-time breakdown adds up to the elapsed time, only grows, and is soon accurate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist_trainer.metrics.agent_metrics import STATES
from kdist_trainer.metrics.aggregation import WallTimeBreakdown
from kdist_trainer.metrics.rank_metrics import WALL_CATEGORIES, WallCategory
from kdist_trainer.processes.liveness import Phase

COUNT = len(WALL_CATEGORIES)
PRODUCTIVE = WALL_CATEGORIES.index(WallCategory.PRODUCTIVE_STEP)

moves = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(STATES)),
    st.tuples(st.just("report"), st.lists(st.floats(0, 5), min_size=COUNT, max_size=COUNT)),
    st.tuples(st.just("read"), st.none()),
)


@given(st.lists(st.tuples(st.floats(0, 10), moves), max_size=40))
def test_categories_add_up_to_elapsed_time_and_none_decreases_whatever_is_reported(
    history: list[tuple[float, tuple[str, object]]],
) -> None:
    now, reported = 1000.0, [0.0] * COUNT
    clock = WallTimeBreakdown(now)
    before = clock.read(now)
    for seconds, (move, argument) in history:
        now += seconds
        if move == "enter":
            clock.enter(str(argument), now=now)
        elif move == "report":
            reported = [a + b for a, b in zip(reported, argument, strict=True)]  # type: ignore[call-overload]
            clock.report(reported, has_stepped=True, now=now)
        shown = clock.read(now)
        assert sum(shown.values()) == pytest.approx(now - 1000, rel=0.01, abs=1e-6)
        assert all(shown[category] >= before[category] for category in WALL_CATEGORIES)
        before = shown


PHASES = {
    str(WallCategory.DATA_WAIT): Phase.DATA,
    str(WallCategory.PRODUCTIVE_STEP): Phase.STEP,
    str(WallCategory.CHECKPOINT_SAVE): Phase.SAVE,
    str(WallCategory.CHECKPOINT_RESTORE): Phase.RESTORE,
}


class Life:
    """Simulates a run second by second, with a scrape every three seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = WallTimeBreakdown(0.0)
        self.reported = [0.0] * len(WALL_CATEGORIES)

    def spend(self, seconds: int, doing: Phase | None = None) -> None:
        for _ in range(seconds):
            self.now += 1.0
            if self.now % 3 == 0:
                self.clock.read(self.now, phase=doing)

    def enter(self, state: str, seconds: int) -> None:
        self.clock.enter(state, now=self.now)
        self.spend(seconds)

    def work(self, category: str, seconds: int) -> None:
        self.spend(seconds, PHASES[category])
        self.reported[WALL_CATEGORIES.index(category)] += seconds
        self.clock.report(self.reported, has_stepped=self.reported[PRODUCTIVE] > 0, now=self.now)


def test_the_breakdown_of_a_run_with_a_restart_is_accurate() -> None:
    life = Life()
    life.spend(2)
    life.enter("rendezvous", 4)
    life.enter("initializing", 5)
    life.enter("running", 0)
    for _ in range(10):
        life.work(WallCategory.DATA_WAIT, 1)
        life.work(WallCategory.PRODUCTIVE_STEP, 7)
    life.work(WallCategory.CHECKPOINT_SAVE, 20)
    life.spend(13, Phase.STEP)  # a step that is never reported: its rank dies
    life.enter("restarting", 3)
    life.enter("rendezvous", 6)
    life.clock.report(life.reported, has_stepped=False, now=life.now)
    life.enter("initializing", 1)
    life.enter("running", 0)
    life.work(WallCategory.CHECKPOINT_RESTORE, 8)
    for _ in range(10):
        life.work(WallCategory.PRODUCTIVE_STEP, 9)
    life.enter("succeeded", 0)
    truth = {
        "startup": 2,
        "rendezvous": 10,
        "init": 6,
        "data_wait": 10,
        "productive_step": 160,
        "checkpoint_save": 20,
    }
    truth |= {
        "idle": 13,
        "restart": 3,
        "checkpoint_restore": 8,
        "evaluation": 0,
        "stalled": 0,
        "unobserved": 0,
    }
    assert sum(truth.values()) == life.now
    shown = life.clock.read(life.now)
    assert {name: round(seconds, 6) for name, seconds in shown.items()} == pytest.approx(
        truth, abs=1.0
    )


def test_a_late_report_replaces_a_guess() -> None:
    life = Life()
    life.enter("initializing", 10)
    # the agent sees a heartbeat before the first report, which speaks of both
    life.enter("running", 2)
    life.reported[WALL_CATEGORIES.index(WallCategory.INIT)] += 8
    life.work(WallCategory.PRODUCTIVE_STEP, 1)
    life.work(WallCategory.PRODUCTIVE_STEP, 20)
    life.spend(5, Phase.STEP)
    life.enter("restarting", 1)
    life.reported[PRODUCTIVE] += 1  # sent by a rank just before it died
    life.clock.report(life.reported, has_stepped=True, now=life.now)
    life.enter("rendezvous", 3)
    life.enter("running", 0)
    life.work(WallCategory.PRODUCTIVE_STEP, 10)
    truth = dict.fromkeys(WALL_CATEGORIES, 0.0) | {
        "init": 12.0,
        "productive_step": 32.0,
        "restart": 1.0,
        "rendezvous": 3.0,
        "idle": 4.0,
    }
    assert life.clock.read(life.now) == pytest.approx(truth, abs=1.0)


def test_a_script_that_reports_nothing_spends_its_time_starting() -> None:
    clock = WallTimeBreakdown(0.0)
    clock.enter("running", now=1.0)
    clock.read(50.0)
    clock.enter("succeeded", now=100.0)
    assert clock.read(100.0) == pytest.approx(
        {**dict.fromkeys(WALL_CATEGORIES, 0.0), "startup": 1.0, "init": 99.0}
    )


def test_the_time_of_a_script_is_unobserved_until_it_reports_a_step() -> None:
    silent, telling = WallTimeBreakdown(0.0, observed=False), WallTimeBreakdown(0.0, observed=False)
    for clock in (silent, telling):
        for state, now in (("rendezvous", 2.0), ("initializing", 5.0), ("running", 6.0)):
            clock.enter(state, now=now)
    nothing = [0.0] * COUNT
    silent.report(nothing, has_stepped=False, now=50.0)
    assert silent.read(100.0) == {
        **dict.fromkeys(WALL_CATEGORIES, 0.0),
        "startup": 2,
        "rendezvous": 3,
        "unobserved": 95,
    }
    stepped = [10.0 if index == PRODUCTIVE else 0.0 for index in range(COUNT)]
    telling.report(nothing, has_stepped=False, now=90.0)
    telling.report(stepped, has_stepped=True, now=100.0)
    shown = telling.read(100.0)
    assert (shown["unobserved"], shown["productive_step"]) == pytest.approx((85.0, 10.0))
