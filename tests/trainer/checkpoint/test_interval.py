"""The interval that loses the least training time: what it follows from, and that no fixed one
loses much less.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kdist_trainer.checkpoint.interval import (
    INTERVAL_EVENT,
    AutoInterval,
    MeasuredSave,
    SaveClock,
    SaveHistory,
    choose_seconds,
    read_history,
)
from tests.draw import read_commit
from tests.trainer.checkpoint.losses import Case, compare, measure

HOUR: Final = 3600.0
CASES: Final = [
    Case(between_losses, cost, cost * factor, shape)
    for between_losses, cost, factor, shape in itertools.product(
        (30, 60, 120, 300, 900, HOUR, 4 * HOUR, 24 * HOUR),
        (0.05, 0.3, 1, 3, 10, 30, 60),
        (1, 4),
        (1.0, 0.7),
    )
]
DRAWN: Final = random.Random(
    os.environ.get("KDIST_SEED") or read_commit(Path(__file__).parent)
).sample(CASES, 5)


def assert_loses_little(case: Case, *, seeds: int) -> None:
    found = compare(case, np.random.default_rng(7), seeds=seeds)
    assert found.first <= 1.5, f"{case}: {found}"
    assert found.later <= 1.15, f"{case}: {found}"
    assert found.beyond_default <= 0.02, f"{case}: {found}"


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_drawn_runs_lose_hardly_more_than_with_the_best_fixed_interval(case: Case) -> None:
    assert_loses_little(case, seeds=60)


@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.timeout(1200)
def test_no_run_loses_much_more_than_with_the_best_fixed_interval() -> None:
    for case in CASES:
        assert_loses_little(case, seeds=200)


@pytest.mark.parametrize(
    ("cost", "duration", "between_losses", "went_back", "seconds"),
    [
        (1.0, 2.0, HOUR, True, 85.2),  # sqrt(2 * 1 * 3600) = 84.9, and a little for the cost
        (1.0, 2.0, 300.0, True, 24.8),
        (1.0, 2.0, 300.0, False, 60.0),  # storage is spared until a loss
        (0.01, 0.1, 60.0, True, 10.0),
        (1.0, 45.0, 300.0, True, 90.0),  # durable before the next one begins
        (1.0, 2.0, 240 * HOUR, True, 600.0),
        (60.0, 100.0, 240 * HOUR, True, 1800.0),
        (300.0, 300.0, 240 * HOUR, True, 3600.0),
        (100.0, 20.0, 30.0, True, 130.0),  # a save costs more than a loss
        (None, 0.0, 1800.0, False, 60.0),  # the first save shows what one costs
        (None, 0.0, 1800.0, True, 10.0),
        (1.0, 2500.0, 300.0, True, 3600.0),
    ],
)
def test_the_interval_follows_from_what_a_save_and_a_loss_cost_within_bounds(
    cost: float | None, duration: float, between_losses: float, went_back: bool, seconds: float
) -> None:
    found = choose_seconds(
        cost=cost, duration=duration, between_losses=between_losses, went_back=went_back
    )
    assert found == pytest.approx(seconds, abs=0.1)


def test_a_processs_first_save_counts_only_while_there_is_no_other() -> None:
    interval = AutoInterval(SaveHistory())
    assert interval.cost is None
    found: list[float | None] = []
    for seconds in (20.0, 1.0, 1.2, 9.0, 1.1, 1.3, 1.4, 1.5):
        interval.add_save(measure(seconds, duration=1.0, is_first=not found))
        found.append(interval.cost)
    assert found[:2] == [20.0, 1.0]
    assert found[-1] == 1.4, "the median of the last five"


def generation(at: float, reason: str = "failure", **fields: Any) -> dict[str, Any]:
    return {"time": at, "event": "generation", "generation": 1, "reason": reason, **fields}


def event(at: float, name: str) -> dict[str, Any]:
    return {"time": at, "event": name, "generation": 1}


def first_step(at: float) -> dict[str, Any]:
    return {"time": at, "event": "first_step", "generation": 1}


@pytest.mark.parametrize(
    ("events", "seconds", "since"),
    [
        ([], (), 0.0),
        ([generation(0, "start")], (), 0.0),
        (
            [generation(0, "start"), first_step(10), event(70, "failure"), generation(80)],
            (60.0,),
            0.0,
        ),
        # in place nothing was lost
        (
            [
                *(generation(0, "start"), first_step(10), event(70, "failure")),
                *(generation(71, kept_step=5), first_step(72), event(92, "failure")),
                generation(100),
            ],
            (80.0,),
            0.0,
        ),
        # stopped, and continued days later; then lost
        (
            [
                *(generation(0, "start"), first_step(10), event(40, "stopped")),
                *(generation(9e5, "resume"), first_step(9e5 + 5)),
                *(event(9e5 + 9, "failure"), generation(9e5 + 20)),
            ],
            (34.0,),
            0.0,
        ),
        # nodes joined
        (
            [generation(0, "start"), first_step(10), generation(60, "join")],
            (),
            50.0,
        ),
        # ranks that are lost before their first step lose nothing
        (
            [generation(0, "start"), event(5, "failure"), generation(6), event(9, "failure")],
            (),
            0.0,
        ),
        # a script notes no stop: it was saved last at 50, and rested for days
        (
            [
                *(generation(0, "start"), first_step(10), event(50, "commit")),
                *(generation(9e5, "resume"), first_step(9e5 + 5)),
                *(event(9e5 + 30, "failure"), generation(9e5 + 40)),
            ],
            (65.0,),
            0.0,
        ),
    ],
)
def test_what_went_back_to_a_checkpoint_is_read_from_the_runs_events(
    events: list[dict[str, Any]], seconds: tuple[float, ...], since: float
) -> None:
    history = read_history(events)
    assert (history.losses, history.since) == (seconds, since)


def test_an_unknown_run_is_taken_for_one_that_loses_a_rank_within_half_an_hour() -> None:
    assert SaveHistory().mean_seconds() == 1800
    assert SaveHistory().mean_seconds(trained=1800) == 3600
    often = SaveHistory()
    for _ in range(50):
        often = often.followed_by(30)
    assert len(often.losses) == 20
    assert often.mean_seconds() == pytest.approx(30, rel=0.15)


def test_the_interval_stays_while_another_one_is_hardly_better() -> None:
    interval = AutoInterval(SaveHistory(cost=4.0))
    before = interval.seconds(0)
    assert before == pytest.approx(math.sqrt(2 * 4 * 1800), rel=0.03)
    assert interval.seconds(900) == before
    assert interval.seconds(1500) > 1.25 * before


def test_a_process_begins_with_what_another_one_has_measured() -> None:
    events = [
        generation(0, "start"),
        first_step(10),
        {"time": 70.0, "event": "commit", "seconds": 9.0, "visible_seconds": 0.5},
        {"time": 90.0, "event": INTERVAL_EVENT, "cost_seconds": 2.5, "seconds": 95.0},
        event(110, "failure"),
        generation(120),
    ]
    history = read_history(events)
    assert history == SaveHistory((100.0,), cost=2.5, duration=9.0)
    assert SaveHistory.from_text(history.to_text()) == history
    assert read_history(events[:3]).cost == 0.5, "until the whole cost is known"
    interval = AutoInterval(history)
    assert interval.seconds(0) == pytest.approx(math.sqrt(2 * 2.5 * 500), rel=0.03)
    interval.take_costs(0.0)
    assert interval.seconds(0) == pytest.approx(math.sqrt(2 * 2.5 * 500), rel=0.03), "not known"
    assert (interval.cost or 0) == 0, "its own is not known"
    interval.add_save(measure(10.0, duration=9.0))
    interval.take_costs(12.0)
    assert interval.cost == 10.0
    assert interval.seconds(0) == pytest.approx(math.sqrt(2 * 12 * 500), rel=0.05), "of all ranks"


def test_what_a_save_costs_is_the_pause_and_how_much_slower_the_steps_next_to_it_are() -> None:
    interval = AutoInterval(SaveHistory())
    save = MeasuredSave(
        step=9,
        stall=0.5,
        duration=4.0,
        steps_during=10,
        step_seconds_during=0.3,
        step_seconds_outside=0.1,
        is_first=False,
    )
    interval.add_save(save)
    assert interval.cost == pytest.approx(2.5)
    faster = AutoInterval(SaveHistory())
    faster.add_save(save._replace(step_seconds_during=0.05))
    assert faster.cost == 0.5, "no save makes steps faster"
    alone = AutoInterval(SaveHistory())
    alone.add_save(save._replace(step_seconds_outside=0.0))
    assert alone.cost == 0.5, "how long steps last otherwise is not known"


def test_ranks_that_go_on_in_place_hand_the_interval_over() -> None:
    before = AutoInterval(SaveHistory(losses=(50.0,)))
    before.add_save(measure(2.0, duration=1.0))
    before.take_costs(3.0)
    clock = SaveClock(before, now=lambda: 0.0)
    after = AutoInterval(SaveHistory())
    SaveClock(after, now=lambda: 9.0).load(clock.to_json())
    assert after.seconds(0) == before.seconds(0)
    assert after.history == replace(before.history, cost=3.0, duration=1.0)
    went_on = AutoInterval(SaveHistory())
    went_on.load(before.to_json(100.0))
    assert went_on.history.since == 100.0
    assert went_on.seconds(0) == before.seconds(100.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"losses": 3, "since": "a", "cost": true}',
        '{"losses": ["a", -1, null, 1e999], "duration": -1}',
    ],
)
def test_a_history_that_is_none_is_empty(text: str) -> None:
    assert SaveHistory.from_text(text) == SaveHistory()


def test_a_change_is_told_from_a_quarter_on_and_every_ten_minutes_at_most() -> None:
    interval = AutoInterval(SaveHistory())
    assert interval.take_change(0) is None, "no save is known"
    interval.take_costs(2.0)
    told = interval.take_change(70)
    assert told is not None
    assert (told["cost_seconds"], told["between_losses_seconds"]) == (2.0, 1870.0)
    assert told["seconds"] == pytest.approx(87, abs=1)
    interval.take_costs(8.0)
    assert interval.seconds(80) > 160
    assert interval.take_change(80) is None, "within ten minutes"
    assert interval.take_change(680) is not None
    interval.take_costs(8.1)
    assert interval.take_change(900) is None, "within ten minutes, and less than a quarter"


def test_rubbish_in_the_ledger_is_no_loss_and_no_cost() -> None:
    rubbish: list[dict[str, Any]] = [
        {},
        {"event": "generation"},
        {"event": "generation", "time": "noon", "reason": "failure"},
        {"event": "commit", "time": 1, "visible_seconds": "long", "seconds": -3},
        {"event": INTERVAL_EVENT, "time": 2, "cost_seconds": math.inf},
    ]
    assert read_history(rubbish) == SaveHistory()
