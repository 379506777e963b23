"""The end report from ledgers written by hand, where every number can be counted on fingers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.ledger import build_report, parse_lines, read_ledger

Record = dict[str, Any]


def step(number: int, generation: int, *, loss: float = 1.0, seconds: float = 1.0) -> Record:
    samples = {"first": (number - 1) * 8, "last": number * 8 - 1}
    measured = {"loss": loss.hex(), "seconds": seconds}
    return {"step": number, "generation": generation, "world_size": 2, **samples, **measured}


def generation(number: int, reason: str, time: float, *, from_step: int = 0) -> Record:
    event = {"time": time, "event": "generation", "generation": number}
    return {**event, "reason": reason, "from_step": from_step, "world_size": 2}


def failure(number: int, time: float, cause: str = "signal", **fields: Any) -> Record:
    return {"time": time, "event": "failure", "generation": number, "cause": cause, **fields}


def first_step(number: int, time: float, at: int) -> Record:
    return {"time": time, "event": "first_step", "generation": number, "step": at}


def commit(at: int, time: float) -> Record:
    spent = {"seconds": 0.5, "visible_seconds": 0.1, "bytes": 1000}
    return {"time": time, "event": "commit", "step": at, **spent}


# Ten steps of one second; killed after step 6, of which 4 were committed; back after 3 s; done at
# 14 s.
INTERRUPTED = (
    [
        generation(1, "start", 100.0),
        first_step(1, 101.0, 1),
        commit(4, 104.5),
        failure(1, 106.0, rank=1, step=6),
        generation(2, "failure", 108.0, from_step=4),
        first_step(2, 109.0, 5),
        commit(10, 114.0),
        {"time": 114.0, "event": "done", "step": 10, "metrics": {"accuracy": 0.98}},
    ],
    [step(n, 1) for n in range(1, 7)] + [step(n, 2, loss=1 / n) for n in range(5, 11)],
)


def test_what_a_run_that_was_ended_at_once_has_not_saved_is_not_lost_yet() -> None:
    events, steps = INTERRUPTED[0][:6], INTERRUPTED[1]
    ended = build_report(events, steps, invocations=[(100.0, 114.0)], unsaved=True)
    assert (ended["notSaved"], ended["steps"]["lost"]) == (6, 2)
    assert ended["checkpoints"]["atRiskSeconds"] == 6.0
    later = [*events, generation(3, "resume", 200.0, from_step=4), first_step(3, 201.0, 5)]
    again = build_report(later, [*steps, step(5, 3)], invocations=[(100.0, 210.0)])
    assert again["steps"]["lost"] == 2 + 6, "a later start begins below them"
    kept = build_report(events, steps, invocations=[(100.0, 114.0)])
    assert (kept["notSaved"], kept["steps"]["lost"]) == (0, 2)
    assert ended["productiveSeconds"] == 4.0 < kept["productiveSeconds"]


def test_a_ledger_with_a_gap_says_which_steps_it_lacks() -> None:
    events, steps = INTERRUPTED
    assert build_report(events, steps, invocations=[(100.0, 114.0)])["ledgerGaps"] == []
    torn = [line for line in steps if line["step"] not in (2, 7, 8)]
    found = build_report(events, torn, invocations=[(100.0, 114.0)])
    assert found["ledgerGaps"] == [[2, 2], [7, 8]]


def test_steps_that_had_to_be_done_again_are_lost_and_others_are_not() -> None:
    report = build_report(*INTERRUPTED, invocations=[(100.0, 114.0)])
    assert report["steps"] == {"reached": 10, "committed": 10, "lost": 2, "samples": 80}


def test_restarts_are_counted_by_the_cause_of_the_failure_before_them() -> None:
    report = build_report(*INTERRUPTED, invocations=[(100.0, 114.0)])
    expected = {"total": 1, "byCause": {"signal": 1}, "joins": 0, "generations": 2}
    assert report["restarts"] == expected


def test_recovery_lasts_from_the_failure_to_the_first_step_after_it() -> None:
    assert build_report(*INTERRUPTED, invocations=[(100.0, 114.0)])["recoverySeconds"] == [3.0]


def test_goodput_counts_each_step_once() -> None:
    report = build_report(*INTERRUPTED, invocations=[(100.0, 114.0)])
    assert (report["productiveSeconds"], report["elapsedSeconds"]) == (10.0, 14.0)
    assert report["goodput"] == pytest.approx(10 / 14, abs=1e-4)


def test_the_final_loss_is_the_last_steps_to_the_bit() -> None:
    report = build_report(*INTERRUPTED, invocations=[(100.0, 114.0)])
    assert report["loss"] == 1 / 10
    assert report["metrics"] == {"accuracy": 0.98}


def test_the_address_of_the_run_in_its_tracker_is_the_last_one() -> None:
    events, steps = INTERRUPTED
    begun = [{"event": "tracker", "url": url} for url in ("https://a", "https://b")]
    for known, expected in (([], None), (begun, "https://b")):
        report = build_report([*events, *known], steps, invocations=[(100.0, 114.0)])
        assert report["tracker"] == expected


def test_a_tracker_that_is_behind_at_the_end_is_said_until_the_job_goes_on() -> None:
    events, steps = INTERRUPTED
    behind, again = {"event": "tracker-behind"}, {"event": "generation", "generation": 9}
    for known, is_said in (([], False), ([behind], True), ([behind, again], False)):
        report = build_report([*events, *known], steps, invocations=[(100.0, 114.0)])
        assert report["trackerBehind"] is is_said


def test_checkpoints_are_summed_up() -> None:
    report = build_report(*INTERRUPTED, invocations=[(100.0, 114.0)])
    expected = {
        "committed": 2,
        "fellBack": 0,
        "seconds": 1.0,
        "visibleSeconds": 0.2,
        "bytes": 1000,
        "bytesPerHour": round(2000 * 3600 / 14),
    }
    expected |= {"lastTime": 114.0, "atRiskSeconds": 0.0}
    assert report["checkpoints"] == expected


def test_a_planned_join_loses_nothing_and_is_no_restart() -> None:
    events = [
        generation(1, "start", 0.0),
        generation(2, "join", 5.0, from_step=3),
        first_step(2, 6.0, 4),
    ]
    steps = [step(n, 1) for n in (1, 2, 3)] + [step(4, 2)]
    report = build_report(events, steps, invocations=[(0.0, 10.0)])
    assert report["steps"]["lost"] == 0
    assert report["restarts"] == {"total": 0, "byCause": {}, "joins": 1, "generations": 2}
    assert report["recoverySeconds"] == []


def test_two_failures_before_a_step_are_one_recovery_and_two_restarts() -> None:
    events = [
        generation(1, "start", 0.0),
        failure(1, 10.0, "oom_host"),
        generation(2, "failure", 11.0, from_step=2),
        failure(2, 12.0, "signal"),
        generation(3, "failure", 13.0, from_step=2),
        first_step(3, 15.0, 3),
    ]
    steps = [step(n, 1) for n in (1, 2, 3)] + [step(3, 3)]
    report = build_report(events, steps, invocations=[(0.0, 20.0)])
    assert report["recoverySeconds"] == [5.0]
    assert report["restarts"]["byCause"] == {"oom_host": 1, "signal": 1}
    assert report["steps"]["lost"] == 1


def test_the_earliest_failure_of_a_generation_is_its_cause() -> None:
    events = [
        generation(1, "start", 0.0),
        failure(1, 6.0, "node_lost"),
        failure(1, 5.0, "hang"),
        generation(2, "failure", 7.0),
    ]
    assert build_report(events, [], invocations=[(0.0, 9.0)])["restarts"]["byCause"] == {"hang": 1}


def test_the_cause_of_a_generation_that_left_no_line_of_its_own_is_known() -> None:
    events = [failure(1, 5.0, "node_lost"), generation(2, "failure", 7.0), first_step(2, 8.0, 1)]
    report = build_report(events, [step(1, 2)], invocations=[(0.0, 9.0)])
    assert report["restarts"]["byCause"] == {"node_lost": 1}
    assert report["recoverySeconds"] == [3.0]


def test_a_failure_that_nobody_could_record_still_counts() -> None:
    events = [generation(1, "start", 0.0), generation(2, "failure", 7.0), first_step(2, 8.0, 1)]
    report = build_report(events, [step(1, 2)], invocations=[(0.0, 9.0)])
    assert report["restarts"]["byCause"] == {"unknown": 1}
    assert report["recoverySeconds"] == [1.0]


def test_steps_whose_lines_died_with_their_writer_are_known_from_the_failure() -> None:
    events = [
        generation(1, "start", 0.0),
        failure(1, 5.0, step=9),
        generation(2, "failure", 6.0, from_step=4),
    ]
    report = build_report(events, [step(n, 1) for n in range(1, 6)], invocations=[(0.0, 9.0)])
    assert report["steps"]["lost"] == 5


def test_falling_back_twice_discards_what_lies_beyond_the_deepest_point() -> None:
    events = [
        generation(1, "start", 0.0),
        generation(2, "failure", 10.0, from_step=6),
        generation(3, "failure", 20.0, from_step=2),
    ]
    steps = [step(n, 1) for n in range(1, 9)] + [step(7, 2)] + [step(n, 3) for n in range(3, 6)]
    report = build_report(events, steps, invocations=[(0.0, 30.0)])
    assert report["productiveSeconds"] == 5.0, (
        "steps 1 and 2 of the first and 3 to 5 of the third generation"
    )
    assert report["steps"]["lost"] == 2 + 5


def test_the_pause_between_two_invocations_is_nobodys_loss() -> None:
    events = [generation(1, "start", 0.0), generation(2, "resume", 1000.0, from_step=2)]
    steps = [step(1, 1), step(2, 1), step(3, 2)]
    report = build_report(events, steps, invocations=[(0.0, 4.0), (1000.0, 1002.0)])
    assert report["elapsedSeconds"] == 6.0
    assert report["restarts"]["total"] == 0


def test_an_invocation_that_was_killed_lasted_until_the_last_thing_it_wrote() -> None:
    events = [
        generation(1, "start", 1.0),
        commit(2, 5.0),
        generation(2, "resume", 100.0, from_step=2),
    ]
    report = build_report(events, [], invocations=[(0.0, None), (99.0, 101.0)])
    assert report["elapsedSeconds"] == 7.0


def test_a_ledger_that_does_not_exist_makes_an_empty_report(tmp_path: Path) -> None:
    report = build_report(*read_ledger(tmp_path), invocations=[(0.0, 5.0)])
    assert report["steps"] == {"reached": 0, "committed": 0, "lost": 0, "samples": None}
    assert (report["loss"], report["metrics"], report["goodput"]) == (None, {}, 0.0)


def test_torn_lines_are_passed_over_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir()
    whole = [json.dumps(step(n, 1)) for n in (1, 2)]
    (folder / "steps.jsonl").write_bytes(
        f'{whole[0]}\n{{"step": 2, "gene\n{whole[1]}\n{{"st'.encode() + b"\xff\x00"
    )
    (folder / "events.jsonl").write_text(
        "[1]\n\n" + json.dumps(generation(1, "start", 0.0)) + '\n{"event": "com'
    )
    report = build_report(*read_ledger(tmp_path), invocations=[(0.0, 5.0)])
    assert report["steps"]["reached"] == 2
    assert report["productiveSeconds"] == 2.0


@given(st.integers(0, 2000), st.integers(0, 2000), st.sampled_from([b"", b"\n", b"\xff", b"{"]))
def test_no_cut_through_a_ledger_breaks_the_report(
    events_cut: int, steps_cut: int, rubbish: bytes
) -> None:
    events, steps = (
        "\n".join(json.dumps(line) for line in lines).encode() for lines in INTERRUPTED
    )
    cut = [
        list(parse_lines(io.BytesIO(data[:at] + rubbish)))
        for data, at in ((events, events_cut), (steps, steps_cut))
    ]
    report = build_report(cut[0], cut[1], invocations=[(100.0, 114.0)])
    assert report["steps"]["lost"] >= 0
    assert 0 <= report["goodput"] <= 1
    assert json.loads(json.dumps(report, allow_nan=False)) == report


_KNOWN = ["event", "time", "generation", "step", "from_step", "cause", "seconds", "loss"]
_FIELDS = st.sampled_from([*_KNOWN, "visible_seconds", "metrics", "reason", "last"])
_NAMES = st.sampled_from(["generation", "failure", "first_step", "commit", "done", "x"])
_NUMBERS = st.none() | st.booleans() | st.integers(-5, 5) | st.floats()
_VALUES = _NUMBERS | _NAMES | st.lists(st.integers(), max_size=1)


@given(st.lists(st.dictionaries(_FIELDS, _VALUES), max_size=8))
def test_no_nonsense_in_a_ledger_breaks_the_report(lines: list[Record]) -> None:
    report = build_report(lines, lines, invocations=[(0.0, 10.0)])
    assert set(report) >= {"steps", "restarts", "goodput"}


def test_the_steps_of_a_script_that_reports_none_are_unknown() -> None:
    began: Record = {"time": 1.0, "event": "generation", "generation": 1, "reason": "start"}
    began |= {"from_step": 0, "entrypoint": "script"}
    report = build_report([began], [], invocations=[(0.0, 10.0)])
    assert report["goodput"] is None
    assert report["productiveSeconds"] is None
    assert report["elapsedSeconds"] == 10.0
    assert report["steps"] == {"reached": None, "committed": 0, "lost": None, "samples": None}


def test_a_script_has_reached_the_last_step_that_it_saved() -> None:
    began: Record = {"event": "generation", "reason": "start", "from_step": 0}
    resumed = {**began, "time": 5.0, "generation": 2, "reason": "resume", "from_step": 60}
    events: list[Record] = [
        {**began, "time": 1.0, "generation": 1, "entrypoint": "script"},
        {"time": 4.0, "event": "commit", "step": 80},
        {**resumed, "entrypoint": "script"},
    ]
    steps = build_report(events, [], invocations=[(0.0, 10.0)])["steps"]
    assert (steps["reached"], steps["committed"]) == (60, 80)
    events.append({"time": 6.0, "event": "commit", "step": 70})
    assert build_report(events, [], invocations=[(0.0, 10.0)])["steps"]["reached"] == 70
