"""Logs of nodes and pods: which lines are the trainer's events, and how an event is shown as a line
of text.
"""

from kdist.events.log import Entry, Line, LogTail, RankFilter, last_words
from kdist.events.text import EventFilter, describe_event, format_line

__all__ = [
    "Entry",
    "EventFilter",
    "Line",
    "LogTail",
    "RankFilter",
    "describe_event",
    "format_line",
    "last_words",
]
