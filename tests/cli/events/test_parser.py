"""An event is a line of its own, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from kdist.events import parse, split_line

DONE = '{"time":"2026-01-31T12:00:00.000Z","event":"done","step":5}'


@pytest.mark.parametrize("line", [DONE, f"{DONE}\r"])
def test_an_event_is_a_line_of_its_own(line: str) -> None:
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
        f"loading... {DONE}",
        f"[rank0]: {DONE}",
        f"[rank0]: x\r{DONE}",
        f"\x1b[2K{DONE}",
        f" {DONE}",
    ],
)
def test_what_is_not_an_event_is_printed_text(line: str) -> None:
    assert parse(line) is None
    assert split_line(line).printed == line.rsplit("\r", 1)[-1]


@pytest.mark.parametrize(
    ("line", "printed", "is_progress_bar"),
    [
        ("10%\r20%", "20%", False),
        ("10%\r20%\r", "20%", True),
        (DONE, "", False),
    ],
)
def test_a_progress_bar_is_reduced_to_its_last_state(
    line: str, printed: str, *, is_progress_bar: bool
) -> None:
    split = split_line(line)
    assert (split.printed, split.is_progress_bar) == (printed, is_progress_bar)
