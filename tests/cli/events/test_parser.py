"""Events are found in any line of a log, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from kdist.events import parse, split_line

DONE = '{"time":"2026-01-31T12:00:00.000Z","event":"done","step":5}'


@pytest.mark.parametrize("line", [DONE, f"loading... {DONE}", f"10%\r20%{DONE}", f"{DONE}\r"])
def test_an_event_is_found_behind_whatever_was_printed(line: str) -> None:
    event = parse(line)
    assert event is not None
    assert (event["event"], event["step"]) == ("done", 5)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "done",
        '{"time": 1',
        '{"time": 1, "event": 5}',
        '{"event": "done"}',
        '{"time":' + "[" * 9**5,
    ],
)
def test_what_is_not_an_event_is_printed_text(line: str) -> None:
    assert parse(line) is None
    assert split_line(line).printed == line


@pytest.mark.parametrize(
    ("line", "printed", "is_progress_bar"),
    [
        ("10%\r20%", "20%", False),
        ("10%\r20%\r", "20%", True),
        (f"10%\r20%\r{DONE}", "20%", True),
        (DONE, "", False),
    ],
)
def test_a_progress_bar_is_reduced_to_its_last_state(
    line: str, printed: str, *, is_progress_bar: bool
) -> None:
    split = split_line(line)
    assert (split.printed, split.is_progress_bar) == (printed, is_progress_bar)
