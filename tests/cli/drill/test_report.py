"""The report of a drill, from ledgers as a restart, a recovery in place and a broken promise leave
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdist.drill.report import Ledger, Observation, build_drill_report, is_over
from tests.cli.drill.test_faults import CONFIG, reports, situation

STEP = 16  # samples


def line(step: int, generation: int, **fields: Any) -> dict[str, Any]:
    first = (step - 1) * STEP
    return {
        "step": step,
        "generation": generation,
        "world_size": 2,
        "first": first,
        "last": first + STEP - 1,
        "loss": (1.0 / step).hex(),
        **fields,
    }


def lines(steps: Iterable[int], generation: int, **fields: Any) -> list[dict[str, Any]]:
    return [line(step, generation, **fields) for step in steps]


EVENTS: list[dict[str, Any]] = [
    {"event": "generation", "generation": 3, "reason": "start"},
    {"event": "commit", "step": 20},
    {
        "event": "failure",
        "generation": 3,
        "cause": "signal",
        "message": "rank 1 was killed by SIGKILL",
    },
    {"event": "generation", "generation": 4, "reason": "failure", "from_step": 20},
]


def observe(steps: list[dict[str, Any]], **fields: Any) -> Observation:
    """A drill `rank` in generation 3, at step 31 of which 20 are saved."""
    after = situation(**reports(generation=4, restarts_remaining=9))
    common: dict[str, Any] = {
        "fault": "rank",
        "target": "rank 1 on node-1",
        "before": situation(),
        "ledger_before": Ledger(EVENTS[:2]),
        "interval": 0.05,
        "struck_at": 100.0,
        "after": after,
        "ledger": Ledger(EVENTS, steps),
        "progress": ((99.9, 3, 31), (101.9, 4, 21), (102.0, 4, 22)),
        "in_time": True,
    }
    return Observation(**{**common, **fields})


RESTARTED = [*lines(range(1, 29), 3), *lines(range(21, 33), 4)]
IN_PLACE = [*lines(range(1, 32), 3), *lines(range(32, 40), 4)]


def kept(seen: Observation) -> list[bool | None]:
    return [each.kept for each in build_drill_report(seen).lines]


def test_a_restart_repeats_the_steps_since_the_checkpoint_with_the_same_bits() -> None:
    seen = observe(RESTARTED)
    assert is_over(seen)
    report = build_drill_report(seen)
    assert report.kept
    assert [each.cells() for each in report.lines] == [
        ("it goes on by itself", "2.0 s without a finished step", "yes"),
        (
            "at most the steps since the checkpoint of step 20 are repeated",
            "11 steps (21 to 31), 11 allowed",
            "yes",
        ),
        ("every sample is used once", "208 in the steps 20 to 32, without a gap", "yes"),
        ("repeated steps have the same loss, to the bit", "8 of 8", "yes"),
    ]
    assert report.facts["generation"] == "3 before, 4 after"
    assert report.facts["restarts"] == "1 used, 9 of 10 left"
    assert report.facts["recorded as"] == "signal: rank 1 was killed by SIGKILL"
    document = report.to_document()
    assert (document["stepsLost"], document["stallSeconds"]) == (11, 2.0)
    assert document["generation"] == {"before": 3, "after": 4}
    assert document["kept"] is True


def test_a_recovery_in_place_repeats_no_step() -> None:
    seen = observe(IN_PLACE, progress=((99.9, 3, 31), (100.2, 4, 32)))
    assert is_over(seen)
    assert seen.lost == 0
    assert kept(seen) == [True, True, True, True]


def test_a_drill_goes_on_until_it_has_seen_how_long_the_job_stalled() -> None:
    assert not is_over(observe(IN_PLACE, progress=((99.9, 3, 31),)))


def test_a_step_that_no_survivor_could_record_has_no_loss_and_breaks_nothing() -> None:
    gap = [*lines(range(1, 31), 3), line(31, 3, loss=None), *lines(range(32, 40), 4)]
    assert kept(observe(gap)) == [True, True, True, True]


def test_a_step_with_another_loss_than_before_breaks_the_promise() -> None:
    steps = [*lines(range(1, 29), 3), line(21, 4, loss="0x1p-1"), *lines(range(22, 33), 4)]
    report = build_drill_report(observe(steps))
    assert report.lines[-1].cells()[1:] == ("1 of 8 differ: step 21", "NO")
    assert not report.kept


def test_more_steps_than_those_since_the_checkpoint_break_the_promise() -> None:
    steps = [*lines(range(1, 29), 3), *lines(range(11, 33), 4)]
    report = build_drill_report(observe(steps))
    assert report.lines[1].cells()[1:] == ("21 steps (11 to 31), 11 allowed", "NO")


def test_a_sample_that_is_left_out_breaks_the_promise() -> None:
    steps = [*lines(range(1, 29), 3), *lines(range(21, 25), 4), *lines(range(26, 33), 4)]
    report = build_drill_report(observe(steps))
    assert report.lines[2].kept is False
    assert "after step 24 the ledger goes on with step 26" in report.lines[2].measured


def test_bits_are_not_known_where_another_number_of_ranks_has_added_them() -> None:
    steps = [*lines(range(1, 29), 3), *lines(range(21, 33), 4, world_size=1)]
    report = build_drill_report(observe(steps))
    assert report.lines[-1].cells()[1:] == (
        "groups of 1 and 2 ranks add in another order",
        "not known",
    )
    assert report.kept
    lost_with_rank_0 = [*lines(range(1, 21), 3), *lines(range(21, 33), 4)]
    assert kept(observe(lost_with_rank_0))[-1] is None


def test_bits_are_no_promise_of_other_strategies_and_of_gpus() -> None:
    other = {**CONFIG, "train": {"strategy": "fsdp"}}
    gpus = {**CONFIG, "resources": {"gpu": 1}}
    for config in (other, gpus):
        assert (
            len(build_drill_report(observe(RESTARTED, before=situation(config=config))).lines) == 3
        )


def test_a_job_that_does_not_come_back_in_time_breaks_the_promise() -> None:
    seen = observe(lines(range(1, 29), 3), in_time=False, waited=300.0, progress=((99.9, 3, 31),))
    assert not is_over(seen)
    report = build_drill_report(seen)
    assert report.lines[0].cells()[1:] == ("not within 300 s", "NO")
    assert report.lines[1].kept is None
    assert not report.kept


def test_a_drill_is_not_over_before_the_lost_steps_were_done_again() -> None:
    assert not is_over(observe([*lines(range(1, 29), 3), *lines(range(21, 32), 4)]))
    assert is_over(observe([*lines(range(1, 29), 3), *lines(range(21, 33), 4)]))


def test_a_short_silence_costs_nothing_but_its_time() -> None:
    progress = ((99.9, 3, 31), *((102.1 + step / 10, 3, 32 + step) for step in range(5)))
    silence: dict[str, Any] = {
        "fault": "silence",
        "lasted": 2.0,
        "after": situation(),
        "ledger": Ledger(EVENTS[:2], lines(range(1, 32), 3)),
    }
    seen = observe([], progress=progress, **silence)
    assert is_over(seen)
    assert (seen.lost, seen.restarts, round(seen.stall or 0, 1)) == (0, 0, 2.2)
    assert kept(seen) == [True, True, True, True]
    residual = ((99.9, 3, 31), (102.1, 3, 32))  # the woken rank ends the step that it was in
    assert not is_over(observe([], progress=residual, **silence))


def test_a_script_that_reports_no_steps_is_over_when_its_ranks_run_again() -> None:
    config = {**CONFIG, "train": None, "script": {"path": "train.py"}}
    seen = observe(
        [],
        before=situation(config=config, **reports(ranks=[], last_checkpoint_step=None)),
        after=situation(config=config, **reports(ranks=[], generation=4)),
        progress=(),
        waited=4.2,
    )
    assert is_over(seen)
    report = build_drill_report(seen)
    assert report.lines[0].measured == "its ranks run again after 4.2 s"
    assert [each.kept for each in report.lines] == [True, None, None]
    assert report.to_document()["stepsLost"] is None


def test_a_job_that_ends_meanwhile_has_either_reached_its_end_or_broken_the_promise() -> None:
    done = Ledger([*EVENTS, {"event": "done", "step": 31}], lines(range(1, 32), 3))
    assert is_over(observe([], ledger=done))
    failed = observe([], in_time=False, after=situation(inactive="it has failed"))
    assert build_drill_report(failed).lines[0].cells()[1:] == ("it has failed", "NO")


def test_the_ledger_is_read_again_when_the_agents_report_new_steps() -> None:
    waiting = observe([], after=situation(**reports(generation=4, ranks=[])), progress=())
    assert waiting.has_moved_on  # a script may report no steps at all
    ranks = [{"rank": 0, "local_rank": 0, "step": 32}]
    beyond = situation(**reports(generation=4, ranks=ranks))
    assert observe([], after=beyond).has_moved_on
    assert not observe([], after=situation()).has_moved_on
    assert not observe([], after=situation(**reports(generation=4))).has_moved_on
