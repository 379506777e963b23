"""An exit record is read from whatever a termination message holds: whole JSON, cut JSON, the end
of a log, or rubbish.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.status import ExitRecord
from kdist_trainer.agent.exit_record import failed, stopped, success
from kdist_trainer.config import Cause, Exit
from kdist_trainer.failure import Failure
from tests.cli.status.objects import record

FAILURE = Failure(
    Cause.USER_CODE,
    Exit.USER,
    True,
    'ValueError: ä "quoted"\nsecond line',
    rank=3,
    node="digits-3",
    step=17,
)


@pytest.mark.parametrize(
    "reported", [failed(FAILURE), success(step=500), stopped("stopped on request", step=3)]
)
def test_what_the_trainer_writes_is_read_as_it_was_meant(reported: dict[str, object]) -> None:
    read = ExitRecord.parse(json.dumps(reported, ensure_ascii=False))
    assert read is not None
    assert read.whole
    assert (read.code, read.cause or None, read.outcome, read.step) == (
        reported["code"],
        reported["cause"],
        reported["outcome"],
        reported["step"],
    )
    assert read.message == reported["message"]


def test_a_record_survives_its_way_through_an_annotation() -> None:
    read = ExitRecord.read(record(70, "user_code", traceback=["a", "b"], collective="all_reduce"))
    assert read is not None
    assert ExitRecord.parse(read.to_text()) == read


@pytest.mark.parametrize("length", range(40, 420, 9))
def test_of_a_record_that_was_cut_the_first_fields_are_read(length: int) -> None:
    text = json.dumps(
        record(70, "user_code", message="ValueError: " + "x" * 300, traceback=["line"] * 50)
    )[:length]
    read = ExitRecord.parse(text)
    assert read is not None
    assert (read.code, read.whole) == (70, False)
    assert "user_code".startswith(read.cause)


def test_the_end_of_a_log_reports_it_where_the_message_is_one() -> None:
    event = {
        "time": "2026-01-31T12:00:00.000Z",
        "event": "failed",
        "cause": "data",
        "code": 65,
        "rank": 1,
        "message": "empty",
    }
    read = ExitRecord.parse(f"loading …\nprogress 3%\r\n{json.dumps(event)}\nbye\n")
    assert read is not None
    assert (read.code, read.cause, read.rank, read.message, read.whole) == (
        65,
        "data",
        1,
        "empty",
        False,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "OOM",
        "{",
        "{}",
        "[1]",
        "null",
        '{"code": 70}',
        '{"code": "70", "cause": "x"}',
        '{"code": 1e999, "cause": "x"}',
        "[" * 9000,
    ],
)
def test_what_is_no_record_reads_as_none(text: str) -> None:
    assert ExitRecord.parse(text) is None


@given(st.text() | st.binary().map(lambda data: data.decode(errors="replace")))
def test_any_text_is_taken_calmly(text: str) -> None:
    read = ExitRecord.parse(text)
    assert read is None or 0 <= read.code <= 255


@given(st.data())
def test_a_record_with_any_values_in_it_is_taken_calmly(data: st.DataObject) -> None:
    reported = record(70, "user_code")
    key = data.draw(st.sampled_from(sorted(reported)))
    reported[key] = data.draw(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers())
    )
    read = ExitRecord.parse(json.dumps(reported))
    assert read is None or isinstance(read.message, str)
