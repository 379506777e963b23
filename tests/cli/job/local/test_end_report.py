"""The end of a run in words: the table's rows, and what is said and advised after every kind of
end.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from kdist.errors import Code, KdistError
from kdist.job.local import end_report
from kdist.job.local.end_report import RunEnded
from kdist.job.local.supervisor import Kind, Outcome

INSTALL = "/x/bin/python -m pip install timm"


def make_report(**fields: Any) -> dict[str, Any]:
    return {
        "job": "digits",
        "outcome": "done",
        "failure": None,
        "invocation": 1,
        "wallSeconds": 61.0,
        "steps": {"reached": 350, "committed": 350, "lost": 12, "samples": 44800},
        "restarts": {"total": 1, "byCause": {"signal": 1}, "joins": 0, "generations": 2},
        "recoverySeconds": [1.4],
        "productiveSeconds": 50.0,
        "elapsedSeconds": 61.0,
        "goodput": 0.8197,
        "checkpoints": {
            "committed": 7,
            "fellBack": 0,
            "seconds": 2.1,
            "visibleSeconds": 0.021,
            "bytes": 1_258_291,
            "bytesPerHour": 536_870_912,
        },
        "loss": 0.01234,
        "metrics": {"accuracy": 0.9778},
        "devices": "2 x NVIDIA H100",
        "warnings": [],
        "folder": "/home/me/.kdist/digits",
        **fields,
    }


def ended(kind: Kind, code: int, **fields: Any) -> RunEnded:
    return RunEnded(Outcome(kind, code, "node-0"), make_report(**fields), signal.SIGINT)


def test_a_loss_that_was_not_finite_is_said_where_a_run_is_called_done() -> None:
    for last, end in (("nan", ", and is nan at the end"), (None, "")):
        said = f"NaN or infinite in 9 reported steps{end}"
        one = ended("done", 0, loss=None, nonFiniteLoss={"steps": 9, "last": last})
        assert ("loss", said) in end_report.summary_rows(one.report)
        assert end_report.conclude(one, "train.py") == f"digits is done, but its loss was {said}."


def test_the_table_holds_what_the_run_cost_and_what_came_of_it() -> None:
    assert list(end_report.summary_rows(make_report())) == [
        ("outcome", "done"),
        ("steps", "350"),
        ("lost steps", "12"),
        ("samples", "44,800"),
        ("restarts", "1 (signal 1)"),
        ("recovery", "1.4 s"),
        ("goodput", "82.0% (50 s of 1:01)"),
        (
            "checkpoints",
            "7, last 1.2 MiB, 512 MiB written an hour; the training waited 21 ms of 2.1 s",
        ),
        ("final loss", "0.01234"),
        ("test accuracy", "97.78%"),
        ("ran on", "2 x NVIDIA H100"),
        ("wall time", "1:01"),
        ("folder", "/home/me/.kdist/digits"),
    ]


def test_of_many_recoveries_it_says_how_many_the_median_and_the_worst() -> None:
    rows = dict(end_report.summary_rows(make_report(recoverySeconds=[0.2, 39.0, 0.3, 0.25, 0.4])))
    assert rows["recovery"] == "0.3 s (median of 5, worst 39 s)"


def test_what_is_not_known_has_no_row() -> None:
    report = make_report(
        steps={"reached": 0, "committed": 0, "lost": 0, "samples": None},
        restarts={"total": 0, "byCause": {}, "joins": 0, "generations": 0},
        checkpoints={
            "committed": 0,
            "fellBack": 0,
            "seconds": 0.0,
            "visibleSeconds": 0.0,
            "bytes": None,
            "bytesPerHour": None,
        },
        recoverySeconds=[],
        productiveSeconds=0.0,
        goodput=0.0,
        loss=None,
        metrics={},
        devices=None,
    )
    expected = ["outcome", "restarts", "wall time", "folder"]
    assert [name for name, _ in end_report.summary_rows(report)] == expected


def test_a_stopped_job_says_what_is_saved_and_how_to_go_on() -> None:
    reported = end_report.conclude(ended("stopped", 200), "job.yaml")
    assert (
        reported
        == "digits stopped; step 350 is saved. Next: kdist run job.yaml   continues from there"
    )


def test_a_job_that_was_ended_at_once_does_not_claim_to_have_saved() -> None:
    report = {"steps": {"reached": 9, "committed": 0, "lost": 0, "samples": 1}}
    reported = end_report.conclude(ended("killed", -9, **report), "job.yaml")
    assert reported == (
        "digits was ended at once; nothing was saved yet. Next: kdist run job.yaml   "
        "starts from the beginning"
    )


def test_a_job_that_was_ended_at_once_says_what_is_not_saved() -> None:
    reported = end_report.conclude(ended("killed", -9, notSaved=1200), "job.yaml")
    assert str(reported).startswith(
        "digits was ended at once; step 350 is saved, the 1,200 steps after it are not. Next: "
    )


def test_gaps_of_the_ledger_are_shown() -> None:
    report = {**ended("done", 0).report, "ledgerGaps": [[2, 2], [7, 1008]]}
    assert dict(end_report.summary_rows(report))["ledger"] == (
        "has no line of 1,003 steps (2, 7-1,008): times and goodput lack them"
    )


def test_a_stop_whose_save_failed_is_an_error() -> None:
    reported = end_report.conclude(ended("stopped", 203), "job.yaml")
    assert isinstance(reported, KdistError)
    assert reported.code == Code.JOB_FAILED
    assert reported.message == "digits stopped, but its state could not be saved; step 350 is saved"


def test_a_stop_that_nobody_could_save_for_is_an_error_with_the_steps_that_are_not_saved() -> None:
    reported = end_report.conclude(ended("stopped", 200, notSaved=357), "job.yaml")
    assert isinstance(reported, KdistError)
    assert reported.code == Code.JOB_FAILED
    assert reported.message == (
        "digits stopped, but its state could not be saved; step 350 is saved, the 357 steps after "
        "it are not"
    )


def test_a_failure_says_who_where_and_why() -> None:
    traceback = [
        "Traceback (most recent call last):",
        '  File "/src/model.py", line 12, in forward',
        "ValueError: boom",
    ]
    failure = {
        "cause": "user_code",
        "rank": 1,
        "node": "node-1",
        "step": 42,
        "message": "ValueError: boom",
        "traceback": traceback,
    }
    reported = end_report.conclude(
        ended("failed", 70, failure={**failure, "agent": "node-0", "log": "/x/log"}), "job.yaml"
    )
    assert isinstance(reported, KdistError)
    assert (
        reported.message
        == "digits failed (user_code), rank 1 on node-1 at step 42: ValueError: boom"
    )
    assert reported.hint == 'File "/src/model.py", line 12, in forward; its log is /x/log'


@pytest.mark.parametrize("failure", [None, {"agent": "node-0", "log": "/x/log"}])
def test_a_failure_without_a_record_still_says_what_is_known(
    failure: dict[str, Any] | None,
) -> None:
    reported = end_report.conclude(ended("failed", 1, failure=failure), "job.yaml")
    assert isinstance(reported, KdistError)
    assert "digits failed (exit code 1)" in reported.message


def test_a_run_that_was_done_before_says_how_to_train_again() -> None:
    reported = end_report.conclude(
        RunEnded(Outcome("done", 0), make_report(), already=True), "job.yaml"
    )
    assert reported == (
        "digits is done already. Next: kdist run --fresh job.yaml   trains it again and "
        "archives this run"
    )


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("user_code", "fix /src/my model.py:12"),
        ("signal", ""),
    ],
)
def test_after_an_error_in_the_users_code_the_advice_is_to_fix_its_line(
    cause: str, expected: str
) -> None:
    failure = {"cause": cause, "agent": "node-0", "place": 'File "/src/my model.py", line 12, in f'}
    reported = end_report.conclude(ended("failed", 70, failure=failure), "--set a=1 job.yaml")
    assert isinstance(reported, KdistError)
    assert (reported.change, reported.next_command) == (expected, "kdist run --set a=1 job.yaml")


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (
            {"rerun": "blocking", "cause": "user_code", "signature": "cuda-assert"},
            ("", "CUDA_LAUNCH_BLOCKING=1 kdist run job.yaml"),
        ),
        ({"rerun": "again", "cause": "device"}, ("", "kdist run job.yaml")),
        (
            {"rerun": "fixed", "cause": "user_code", "signature": "missing-package"}
            | {"advice": f"install it for /x/bin/python: {INSTALL}"},
            (INSTALL, "kdist run job.yaml"),
        ),
        (
            {"rerun": "fixed", "cause": "oom_device", "place": None, "advice": "lower it"},
            ("do what the hint says", "kdist run job.yaml"),
        ),
    ],
)
def test_the_next_command_never_repeats_unchanged_what_must_fail_again(
    known: dict[str, Any], expected: tuple[str, str]
) -> None:
    place = 'File "/src/model.py", line 12, in f'
    failure = {"agent": "node-0", "advice": "look there", "place": place, **known}
    reported = end_report.conclude(ended("failed", 70, failure=failure), "job.yaml")
    assert isinstance(reported, KdistError)
    assert (reported.change, reported.next_command) == expected
    assert str(failure["advice"]) in str(reported.hint)
    assert ("model.py" in str(reported.hint)) == (
        known["rerun"] != "blocking" and known.get("place", place) is not None
    ), "a kernel reports late: its line is not to be trusted"
