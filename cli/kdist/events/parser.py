"""Recognizes the trainer's events in lines of logs.

An event is a JSON object that starts with its time, at the start of a line: only agents write such
lines, since every line that a rank has printed has a prefix (`kdist_trainer.agent.logs`).
Prints may contain carriage returns (progress bars) and text that looks like an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kdist_trainer.untrusted_text import MalformedTextError, parse_json

Event = Mapping[str, Any]
"""Fields of an event: `event`, its name, and others such as `time`, `level`, `node` and `rank`."""

_EVENT_START = '{"time"'


class ParsedLine(NamedTuple):
    """A line of a log: what was printed, or an event.

    Attributes:
        printed: the print, without what a progress bar has overwritten; empty for an event.
        event: the event that the line is; None if it is a print.
        is_progress_bar: whether the print is a state of a progress bar, which the next one
            replaces.
    """

    printed: str
    event: Event | None
    is_progress_bar: bool


def split_line(line: str) -> ParsedLine:
    """What a line is, given without its newline."""
    event = _decode(line) if line.startswith(_EVENT_START) else None
    printed = line if event is None else ""
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
