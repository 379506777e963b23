"""Trainer events in logs. Agents and ranks write one JSON object per line to their log, mixed with
whatever the training prints; the format is defined in `kdist_trainer.log`.

`parser` is the only place that recognizes an event in a line of text. `log` follows a growing log
file and yields events and printed lines. `text` turns an event into a sentence or a line, and
decides which events are worth a line.

Kubernetes' own events (`kdist events`) do not belong here, nor does fetching the logs of pods; see
`kdist.jobs`. Read `parser` first.
"""

from kdist.events.log import (
    Entry,
    LogTail,
    last_printed_line,
    read_files,
    read_timed,
    with_time,
)
from kdist.events.parser import Event, ParsedLine, parse, split_line
from kdist.events.text import EventFilter, describe_event, format_line

__all__ = [
    "Entry",
    "Event",
    "EventFilter",
    "LogTail",
    "ParsedLine",
    "describe_event",
    "format_line",
    "last_printed_line",
    "parse",
    "read_files",
    "read_timed",
    "split_line",
    "with_time",
]
