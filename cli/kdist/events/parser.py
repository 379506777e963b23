"""Recognizes the trainer's events in lines of logs.

An event is a JSON object that starts with its time, on a line of its own or behind a print that
lacks its newline. Prints may contain carriage returns (progress bars) and text that only looks like
JSON; neither hides an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kdist_trainer.untrusted_text import MalformedTextError, parse_json

Event = Mapping[str, Any]
"""Fields of an event: `event`, its name, and others such as `time`, `level`, `node` and `rank`."""

_EVENT_START = '{"time"'


class ParsedLine(NamedTuple):
    """A line of a log, split into what was printed and the event behind it.

    Attributes:
        printed: the print, without what a progress bar has overwritten.
        event: the event at the end of the line; None if there is none.
        is_progress_bar: whether the print is a state of a progress bar, which the next one
            replaces.
    """

    printed: str
    event: Event | None
    is_progress_bar: bool


def split_line(line: str) -> ParsedLine:
    """Split a line, given without its newline, into its print and its event."""
    start = line.find(_EVENT_START)
    event = _decode(line[start:]) if start >= 0 else None
    printed = line if event is None else line[:start]
    visible = printed.rstrip("\r").rsplit("\r", 1)[-1]
    return ParsedLine(visible, event, is_progress_bar=printed.endswith("\r"))


def parse(line: str) -> Event | None:
    """Return the event in a line; None if the line holds none."""
    return split_line(line).event


def _decode(text: str) -> Event | None:
    try:
        event = parse_json(text)
    except MalformedTextError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
