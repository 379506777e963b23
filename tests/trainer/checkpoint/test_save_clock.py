"""When saves are due: training time counts, over the losses of ranks."""

from __future__ import annotations

import pytest

from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.interval import (
    UNSAVED_VARIABLE,
    MeasuredSave,
    SaveClock,
    SaveInterval,
)

EVERY = 300.0


class Interval(SaveInterval):
    """A fixed interval that remembers what saves have cost."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.saves: list[MeasuredSave] = []

    def add_save(self, save: MeasuredSave) -> None:
        self.saves.append(save)


class Training:
    """A training whose time is told, of one step a second."""

    def __init__(self, lost: float = 0.0, every: float = EVERY) -> None:
        self.time = 1000.0
        self.step = 0
        self.interval = Interval(every)
        self.clock = self.make_clock(lost)
        self.clock.start()

    def make_clock(self, lost: float = 0.0) -> SaveClock:
        return SaveClock(self.interval, lost=lost, now=lambda: self.time)

    def train(self, seconds: int) -> None:
        for _ in range(seconds):
            self.time += 1.0
            self.step += 1
            self.clock.add_steps(1, 1.0)

    def wait(self, seconds: float) -> None:
        """What is no training."""
        self.clock.pause()
        self.time += seconds

    def is_due(self) -> bool:
        return self.clock.is_due(self.step)

    def seconds_until_due(self) -> int:
        for seconds in range(10_000):
            if self.is_due():
                return seconds
            self.train(1)
        return -1

    def end_save(self, step: int, *, ok: bool = True, secondary: bool = False) -> None:
        self.clock.save_ended(SaveResult(step, ok=ok, secondary=secondary, total_seconds=5.0))

    def continue_in_place(self, newest: int, *, carried: int | None = None) -> None:
        """A rank whose clock is new goes on with this one's."""
        self.wait(50)
        document = self.clock.to_json()
        self.clock = self.make_clock()
        self.clock.load(document)
        self.clock.follow(newest, carried=carried)
        self.clock.start()


def test_a_save_is_due_after_the_interval_of_training() -> None:
    training = Training()
    assert training.seconds_until_due() == EVERY


@pytest.mark.parametrize("apart", [1, 7, 45, 60, 99])
def test_a_save_that_ranks_must_agree_on_is_as_near_to_its_time_as_can_be(apart: int) -> None:
    """What they are asked at one exchange, they know at the next."""
    training = Training()
    is_asked = False
    while not is_asked:
        is_asked = training.clock.is_due(training.step, answered_after=apart)
        training.train(apart)
    assert abs(training.clock.unsaved - EVERY) <= apart / 2


def test_training_that_was_lost_counts() -> None:
    assert Training(lost=200).seconds_until_due() == 100


def test_a_long_loss_makes_a_save_due_with_the_first_new_step() -> None:
    training = Training(lost=90_000)
    training.clock.restored(0)
    assert not training.is_due(), "there is nothing new to save"
    assert training.seconds_until_due() == 1
    assert training.clock.unsaved == EVERY + 1


def test_none_is_due_while_one_is_in_progress() -> None:
    training = Training()
    training.train(300)
    training.clock.save_started(training.step)
    saved = training.step
    training.train(1000)
    assert not training.is_due()
    training.end_save(saved)
    assert training.is_due(), "what was trained meanwhile is unsaved"
    assert training.clock.unsaved == 1000


@pytest.mark.parametrize(("failures", "pause"), [(1, 20), (2, 40), (3, 80), (4, 160), (5, 300)])
def test_after_failed_saves_the_next_one_is_soon_and_then_ever_later(
    failures: int, pause: int
) -> None:
    training = Training()
    for _ in range(failures):
        training.seconds_until_due()
        training.clock.save_started(training.step)
        training.end_save(training.step, ok=False)
    assert training.seconds_until_due() == pause


def test_a_save_that_succeeds_ends_the_pauses() -> None:
    training = Training()
    for ok in (False, False, True, False):
        training.seconds_until_due()
        training.clock.save_started(training.step)
        training.end_save(training.step, ok=ok)
    assert training.seconds_until_due() == 20, "as after the first one"


def test_in_place_the_clock_goes_on_and_the_recovery_is_no_training() -> None:
    training = Training(lost=100)
    training.train(150)
    training.continue_in_place(newest=-1)
    assert (training.clock.unsaved, training.clock.at_risk) == (250, 150)
    assert training.seconds_until_due() == 50


def test_in_place_a_save_that_was_cut_is_due_again_and_the_next_one_but_one_blocks() -> None:
    training = Training()
    blocking = []
    for _ in range(3):
        training.seconds_until_due()
        blocking.append(training.clock.must_block)
        training.clock.save_started(training.step)
        training.train(10)
        training.clock.pause()
        training.end_save(training.step - 10, ok=False, secondary=True)
        training.continue_in_place(newest=-1)
    assert blocking == [False, False, True]
    assert training.is_due()


def test_in_place_a_save_whose_end_the_survivor_has_not_seen_counts_if_it_is_on_the_disk() -> None:
    training = Training()
    training.train(300)
    training.clock.save_started(training.step)
    training.train(10)
    training.end_save(300, ok=False, secondary=True)
    training.continue_in_place(newest=300)
    assert training.clock.unsaved == 10
    assert not training.clock.must_block


def test_a_checkpoint_that_is_restored_makes_what_is_newer_lost() -> None:
    training = Training()
    training.train(100)
    training.clock.restored(40)
    assert (training.clock.unsaved, training.clock.at_risk) == (100, 0)


def test_what_a_save_has_cost_is_told_to_the_interval() -> None:
    training = Training()
    training.train(300)
    training.clock.save_started(training.step)
    training.clock.save_stalled(0.5)
    for _ in range(2):
        training.clock.add_steps(1, 3.0)
    training.end_save(300)
    [save] = training.interval.saves
    assert (save.step, save.stall, save.duration) == (300, 0.5, 5.0)
    assert (save.steps_during, save.step_seconds_during) == (2, 3.0)
    assert save.step_seconds_outside == 1.0


def test_a_rank_that_starts_continues_what_the_agent_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(UNSAVED_VARIABLE, "120.5")
    assert SaveClock.from_environment(SaveInterval(300)).unsaved == 120.5
    monkeypatch.setenv(UNSAVED_VARIABLE, "much")
    assert SaveClock.from_environment(SaveInterval(300)).unsaved == 0


def test_without_an_interval_nothing_is_due() -> None:
    clock = SaveClock(SaveInterval(None), lost=500)
    clock.start()
    assert not clock.is_due(5)


def test_a_save_that_ranks_have_cut_which_are_not_replaced_holds_up_no_later_one_for_long() -> None:
    training = Training()
    training.seconds_until_due()
    training.clock.save_started(training.step)
    training.end_save(training.step, ok=False, secondary=True)
    assert training.seconds_until_due() == 20


def test_in_place_a_save_that_a_rank_carries_on_is_in_progress_until_it_is_committed() -> None:
    training = Training()
    training.seconds_until_due()
    training.clock.save_started(training.step)
    training.train(1000)
    training.continue_in_place(newest=-1, carried=300)
    assert not training.is_due()
    assert training.clock.cuts == 0
    training.train(10)
    training.end_save(300)
    assert training.clock.unsaved == 1010


def test_in_place_a_save_that_a_lost_rank_has_carried_is_a_cut_one() -> None:
    training = Training()
    for cuts in (1, 2):
        training.seconds_until_due()
        training.clock.save_started(training.step)
        training.train(10)
        training.continue_in_place(newest=-1)
        assert training.clock.cuts == cuts
        assert training.is_due()
