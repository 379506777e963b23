"""The goodput report of ledgers that are small enough to count every second."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.report import command, html, text
from kdist.report.goodput import CATEGORIES, PodStartup, build_goodput_report
from tests.cli.test_ledger import commit, failure, first_step, generation, step

Record = dict[str, Any]

# Ten steps of one second, each waiting 0.25 s; killed after step 6, of which 4 were committed; back
# after 3 s; done at 14 s.
EVENTS: list[Record] = [
    generation(1, "start", 104.0),
    first_step(1, 107.0, 1),
    commit(4, 110.5),
    failure(1, 113.0, rank=1, step=6, node="b", message="gone"),
    generation(2, "failure", 116.0, from_step=4),
    first_step(2, 118.0, 5),
    commit(10, 123.5),
    {"time": 124.0, "event": "done", "step": 10, "metrics": {}},
]
STEPS: list[Record] = [
    line | {"wait_seconds": 0.25}
    for line in [step(n, 1) for n in range(1, 7)] + [step(n, 2, loss=1 / n) for n in range(5, 11)]
]
ACTIVE = [(100.0, 125.0)]


def seconds(report: Record) -> Record:
    return {name: value for name, value in report["secondsByCategory"].items() if value}


def test_every_second_of_a_run_with_a_kill_is_in_a_category() -> None:
    report = build_goodput_report(EVENTS, STEPS, active=ACTIVE)
    assert seconds(report) == {
        "rendezvous": 4.0,
        "start": pytest.approx(2.0 + 1.0),
        "productive": pytest.approx(7.5),  # ten steps that count, less the waiting
        "allReduceWait": pytest.approx(2.5),
        "checkpoint": pytest.approx(0.2),
        "lost": pytest.approx(2.9),  # steps 5 and 6, and what was under way when the rank died
        "down": 3.0,
        "other": pytest.approx(1.9),
    }
    assert (
        sum(report["secondsByCategory"].values()) == pytest.approx(report["elapsedSeconds"]) == 25.0
    )
    useful = sum(report["secondsByCategory"][name] for name in text.USEFUL)
    assert report["goodput"] == pytest.approx(useful / 25) == pytest.approx(10 / 25)


def test_the_help_names_every_category() -> None:
    told = " ".join((command.command.help or "").split())
    assert [label for label in text.LABELS.values() if label not in told] == []


def test_a_machine_at_fault_is_named_where_the_attempt_ended_and_above_the_table() -> None:
    told = {"machine": "gpu-7", "fault": "device", "cause": "device", "message": "ECC"}
    events = [event | told if event["event"] == "failure" else event for event in EVENTS]
    report = build_goodput_report(events, STEPS, active=ACTIVE)
    (faults,) = report["machineFaults"]
    assert (faults["machine"], faults["faults"], faults["time"]) == ("gpu-7", 1, 113.0)
    assert report["attempts"][0]["failure"]["machine"] == "gpu-7"
    assert text.remarks(report) == ["faulty machine gpu-7: 1 fault, last device: ECC"]
    (behind,) = text.remarks({"trackerBehind": True})
    assert behind == "steps are missing in the tracker; see `tracker-failed` in the log"


def test_attempts_count_kept_and_lost_steps_and_name_what_ended_them() -> None:
    first, second = build_goodput_report(EVENTS, STEPS, active=ACTIVE)["attempts"]
    assert first["reason"] == "start"
    assert first["keptSteps"] == 4
    assert first["lostSteps"] == 2
    assert first["endedBy"] == "signal"
    assert first["failure"] == {"rank": 1, "node": "b", "step": 6, "message": "gone"}
    assert second["reason"] == "failure"
    assert second["fromStep"] == 4
    assert second["keptSteps"] == 6
    assert second["lostSteps"] == 0
    assert second["endedBy"] is None


def test_queue_and_image_pull_come_from_the_pods() -> None:
    startups = [
        PodStartup(100.0, 101.0, 103.0, pull_seconds=1.5),
        PodStartup(100.2, 101.5, 103.5, pull_seconds=0.5),
        PodStartup(900.0),
    ]
    found = seconds(build_goodput_report(EVENTS, STEPS, active=ACTIVE, startups=startups))
    assert (found["queue"], found["imagePull"]) == (1.5, 1.5)
    assert found["rendezvous"] == pytest.approx(0.5)
    assert found["start"] == pytest.approx(3.0 + 0.5)


def test_the_time_of_fetching_comes_from_the_pods() -> None:
    startups = [
        PodStartup(100.0, 101.0, 103.5, pull_seconds=0.5, fetched=103.0),
        PodStartup(100.0, 101.0, 102.5, pull_seconds=0.5, fetched=102.0),
    ]
    found = seconds(build_goodput_report(EVENTS, STEPS, active=ACTIVE, startups=startups))
    assert (found["queue"], found["imagePull"], found["fetch"]) == (1.0, 0.5, 1.5)


def test_time_outside_of_active_intervals_is_not_counted() -> None:
    events = [
        generation(1, "start", 101.0),
        first_step(1, 102.0, 1),
        commit(2, 103.0),
        {"time": 103.5, "event": "stopped", "step": 2},
        generation(2, "resume", 1002.0, from_step=2),
        first_step(2, 1003.0, 3),
        {"time": 1005.0, "event": "done", "step": 4},
    ]
    steps = [step(1, 1), step(2, 1), step(3, 2), step(4, 2)]
    report = build_goodput_report(events, steps, active=[(100.0, 104.0), (1001.0, 1005.0)])
    assert report["elapsedSeconds"] == 8.0
    assert sum(report["secondsByCategory"].values()) == pytest.approx(8.0)
    assert report["secondsByCategory"]["down"] == 0
    assert report["secondsByCategory"]["rendezvous"] == 2.0


def test_steps_since_the_last_event_are_counted_too() -> None:
    events = [generation(1, "start", 104.0), first_step(1, 107.0, 1), commit(2, 108.5)]
    report = build_goodput_report(
        events, [step(number, 1) for number in range(1, 11)], active=[(100.0, None)]
    )
    assert seconds(report)["productive"] == pytest.approx(10.0)
    # nine more steps of a second after the first one's end
    assert report["elapsedSeconds"] == pytest.approx(16.0)
    assert sum(report["secondsByCategory"].values()) == pytest.approx(16.2, abs=0.21)


# Twice forty steps of half a second; the first `kdist run` could not save at its end after step 40,
# the second one was killed after step 60, and the third has begun below both.
UNSAVED: list[Record] = [
    generation(1, "start", 101.0),
    first_step(1, 102.0, 1),
    commit(20, 112.0),
    generation(2, "resume", 201.0, from_step=20),
    first_step(2, 202.0, 21),
    commit(30, 207.0),
]
UNSAVED_STEPS: list[Record] = [step(n, 1, seconds=0.5) for n in range(1, 41)] + [
    step(n, 2, seconds=0.5) for n in range(21, 61)
]
TWO_RUNS = [(100.0, 123.0), (200.0, None)]


def test_a_group_that_no_event_ended_ends_with_its_run_and_not_with_the_next_one() -> None:
    report = build_goodput_report(UNSAVED, UNSAVED_STEPS, active=TWO_RUNS)
    first, second = report["attempts"]
    assert first["ended"] == 123.0
    assert second["ended"] == report["attempts"][1]["began"] + 1.0 + 39 * 0.5
    assert sum(report["secondsByCategory"].values()) == pytest.approx(report["elapsedSeconds"])
    assert text.totals(report)[-1][-1] == "100.0%"


def test_steps_after_the_last_checkpoint_of_what_has_ended_are_not_kept() -> None:
    running = build_goodput_report(UNSAVED, UNSAVED_STEPS, active=TWO_RUNS)
    assert [each["unsavedSteps"] for each in running["attempts"]] == [0, 0]
    ended = build_goodput_report(UNSAVED, UNSAVED_STEPS, active=TWO_RUNS, unsaved=True)
    counts = [
        (one["keptSteps"], one["lostSteps"], one["unsavedSteps"]) for one in ended["attempts"]
    ]
    assert counts == [(20, 20, 0), (10, 0, 30)]
    assert [row[5] for row in text.attempts(ended)] == ["20", "30 not saved"]
    # of a run that was killed the last commit takes a part of what is known of its time
    assert ended["secondsByCategory"]["lost"] == pytest.approx(10.0 + 15.0 - 0.1)
    assert "60 steps, 20 lost, 30 not saved · 0 restarts" in text.headline(ended)
    failed = [*UNSAVED, {"time": 222.0, "event": "failed", "code": 1}]
    assert build_goodput_report(failed, UNSAVED_STEPS, active=TWO_RUNS)["notSaved"] == 30
    done = [*UNSAVED, {"time": 222.0, "event": "done", "step": 60}]
    assert not build_goodput_report(done, UNSAVED_STEPS, active=TWO_RUNS, unsaved=True)["notSaved"]


def test_a_loss_is_counted_once_however_many_attempts_begin_below_it() -> None:
    later = [
        generation(3, "failure", 301.0, from_step=30),
        generation(4, "failure", 302.0, from_step=10),
        first_step(4, 303.0, 11),
    ]
    steps = [*UNSAVED_STEPS, step(11, 4)]
    report = build_goodput_report([*UNSAVED, *later], steps, active=[(100.0, 310.0)])
    assert [one["lostSteps"] for one in report["attempts"]] == [30, 40, 0, 0]
    assert report["steps"]["lost"] == 70
    for one in report["attempts"]:
        parts = one["keptSteps"] + one["lostSteps"] + one["unsavedSteps"]
        assert parts == one["reachedStep"] - one["fromStep"]


def test_a_run_without_a_worker_group_is_all_other() -> None:
    report = build_goodput_report(
        [{"time": 105.0, "event": "failure", "generation": 1}], [], active=[(100.0, 110.0)]
    )
    assert (seconds(report), report["attempts"]) == ({"other": 10.0}, [])


def test_the_rows_show_shares_and_the_rank_that_failed() -> None:
    report = build_goodput_report(EVENTS, STEPS, active=ACTIVE)
    assert ("down", "3.0 s", "12.0%") in text.totals(report)
    assert text.totals(report)[-1] == ("total", "25 s", "100.0%")
    expected = ("1", "start", "step 0", "6", "4", "2", "13 s", "30.8%", "signal: gone")
    assert text.attempts(report)[0] == expected
    report["attempts"][0]["failure"]["message"] = "a traceback that is long\n" * 3
    assert text.attempts(report)[0][-1] == "signal: a traceback that is long"
    report["attempts"][0]["failure"]["message"] = "far too long " * 9
    assert text.attempts(report)[0][-1] == "signal (rank 1)"
    assert text.headline(report) == (
        "goodput 40.0% · 10 steps, 2 lost · 1 restart · recovered in 5.0 s · loss 0.1"
    )


class Page(HTMLParser):
    """Records tags that are not closed in order, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")
        ]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_draws_everything_and_fetches_nothing() -> None:
    report = {"job": "<b>digits</b>", **build_goodput_report(EVENTS, STEPS, active=ACTIVE)}
    report["attempts"][0]["failure"]["message"] = "<script>alert(1)</script>"
    text = html.render_report(report)
    reader = Page()
    reader.feed(text)
    assert (reader.open, reader.outside) == ([], [])
    assert reader.tags.count("svg") == 3
    assert reader.tags.count("polyline") == 1
    assert "script" not in reader.tags
    assert "&lt;b&gt;digits" in text
    assert all(f"rect.{category}" in text for category in CATEGORIES)


def test_a_page_of_a_run_that_did_nothing_yet_can_be_drawn() -> None:
    text = html.render_report({"job": "d", **build_goodput_report([], [], active=[(1.0, None)])})
    assert "too few steps" in text
    assert "There are no attempts" in text


VALUES = (
    st.none()
    | st.integers(-5, 20)
    | st.floats(allow_nan=True)
    | st.text(max_size=3)
    | st.booleans()
)
NAMES = st.sampled_from(
    [
        "time",
        "event",
        "generation",
        "step",
        "from_step",
        "reason",
        "seconds",
        "visible_seconds",
        "rank",
    ]
)
EVENT = st.dictionaries(NAMES, VALUES, max_size=7) | st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            ["generation", "failure", "first_step", "commit", "done", "stopped"]
        ),
        "time": st.floats(0, 1e4),
        "generation": st.integers(0, 5),
        "from_step": st.integers(0, 9),
        "reason": st.sampled_from(["start", "resume", "failure", "join"]),
        "step": st.integers(0, 9),
    }
)


@pytest.mark.sampled
@given(
    st.lists(EVENT, max_size=12),
    st.lists(EVENT, max_size=12),
    st.floats(0, 1e4),
    st.floats(0, 1e4) | st.none(),
    st.booleans(),
)
def test_no_ledger_makes_the_report_or_its_page_raise(
    events: list[Record], steps: list[Record], began: float, ended: float | None, unsaved: bool
) -> None:
    report = build_goodput_report(events, steps, active=[(began, ended)], unsaved=unsaved)
    assert all(value >= 0 for value in report["secondsByCategory"].values())
    assert all(one["keptSteps"] >= 0 and one["unsavedSteps"] >= 0 for one in report["attempts"])
    assert json.dumps(report)
    assert html.render_report({"job": "d", **report}).endswith("</html>\n")


def test_the_time_of_a_script_that_reports_no_steps_is_unobserved() -> None:
    began: Record = {"time": 1.0, "event": "generation", "generation": 1, "reason": "start"}
    began |= {"from_step": 0, "entrypoint": "script"}
    report = build_goodput_report([began], [], active=[(0.0, 10.0)])
    assert {name: value for name, value in report["secondsByCategory"].items() if value} == {
        "rendezvous": 1.0,
        "unobserved": 9.0,
    }
    assert text.headline(report) == "goodput unknown · steps unknown · 0 restarts"
    assert text.attempts(report)[0][3:6] == ("-", "-", "-")


VERSIONS = {"python": "3.12.1", "torch": "2.15.0", "kdist": "0.2.0", "packages": "1f2e"}


def test_what_the_attempts_computed_with_is_shown_where_it_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    events = [dict(event) for event in EVENTS]
    events[0]["environment"] = {**VERSIONS, "commit": "a" * 40, "unknown": "x", "token": "s3cret"}
    events[4]["environment"] = {**VERSIONS, "torch": "2.16.0"}
    report = build_goodput_report(events, STEPS, active=ACTIVE)
    first = {"sinceAttempt": 1, **VERSIONS, "commit": "a" * 40}
    second = {"sinceAttempt": 2, **VERSIONS, "torch": "2.16.0"}
    assert report["environments"] == [first, second]
    known = f"python 3.12.1, torch 2.15.0, kdist 0.2.0, packages 1f2e, commit {'a' * 40}"
    lines = text.environment({**report, "appliedCommit": "b-dirty", "images": ["r/i@sha256:1"]})
    assert lines[0] == f"since attempt 1: {known}"
    assert lines[2:] == ["applied from commit b-dirty", "image r/i@sha256:1"]
    assert lines[0] in html.render_report({**report, "job": "x"})
    command._show({**report, "job": "x"})
    assert capsys.readouterr().out.splitlines()[-3:] == ["", *lines[:2]]
    assert build_goodput_report(EVENTS, STEPS, active=ACTIVE)["environments"] == []
