"""One JSON line per event on standard error, written by agents and ranks alike.

A line is one `write` of at most 4 KiB, so that lines of several processes that share a pipe or a
log file never interleave. Its fields are `{"time", "event", "level", "job", "node", "rank",
"generation", "step", …}`. Names of events are stable kebab-case words; the optional field `message`
is a sentence for people. Logging never raises.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kdist_trainer.formats.json_text import encode_json

MAX_LINE = 4096
"""The most bytes of a line with its newline: PIPE_BUF, which Linux writes to a pipe atomically."""

_STDERR = 2
_SHORT_TEXT = 400
_TINY_TEXT = 30
_SHORT_LIST = 8
_FROM_ENVIRONMENT = (
    ("job", "KDIST_JOB"),
    ("node", "KDIST_NODE"),
    ("rank", "RANK"),
    ("generation", "KDIST_GENERATION"),
)
_IDENTITY = ("time", "event", "level", "job", "node", "rank", "generation", "step")
_bound: dict[str, Any] | None = None
_sink: Callable[[bytes], object] | None = None


def bind(**fields: Any) -> None:
    """Set fields of every later line of this process; `None` removes a field.

    The initial fields come from the environment of a rank: KDIST_JOB, KDIST_NODE, RANK and
    KDIST_GENERATION.
    """
    bound = bound_fields()
    bound.update(fields)
    for name in [name for name, value in bound.items() if value is None]:
        del bound[name]


def write_to(sink: Callable[[bytes], object] | None) -> None:
    """Pass every later line of this process to `sink`; None restores standard error."""
    global _sink
    _sink = sink


def event(name: str, /, **fields: Any) -> None:
    """Log an event of normal operation."""
    _write("info", name, fields)


def warn(name: str, /, **fields: Any) -> None:
    """Log a problem that does not stop the work."""
    _write("warning", name, fields)


def error(name: str, /, **fields: Any) -> None:
    """Log a failure."""
    _write("error", name, fields)


def not_reproducible(why: str) -> None:
    """Log that the training will not be bitwise identical to an uninterrupted one."""
    message = f"the training continues correctly, but is not bitwise identical: {why}"
    event("not-reproducible", why=why, message=message)


def render(level: str, name: str, fields: Mapping[str, Any], *, now: datetime) -> bytes:
    """Encode one line with its newline, in at most `MAX_LINE` bytes: long texts and lists are cut,
    then left out. Fields override the bound ones; None leaves one out. `level` is `info`, `warning`
    or `error`, and `now` has a time zone.
    """
    time = now.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line: dict[str, Any] = {"time": time, "event": name, "level": level}
    line.update({key: value for key, value in bound_fields().items() if key not in fields})
    line.update({key: value for key, value in fields.items() if value is not None})
    return encode(line)


def encode(line: Mapping[str, Any]) -> bytes:
    """Encode the fields of one line with its newline, in at most `MAX_LINE` bytes."""
    line = {key: line[key] for key in (*_IDENTITY, *line) if key in line}
    text = _encode({key: plain(value) for key, value in line.items()})
    if len(text) <= MAX_LINE:
        return text
    text = _encode({key: _shortened(value, _SHORT_TEXT) for key, value in line.items()})
    if len(text) <= MAX_LINE:
        return text
    # A character takes at most 12 bytes once escaped, so nine short texts always fit.
    kept = {
        key: _shortened(line[key], _TINY_TEXT) for key in (*_IDENTITY, "message") if key in line
    }
    return _encode({**kept, "truncated": True})


def bound_fields() -> dict[str, Any]:
    """The fields of every line of this process."""
    global _bound
    if _bound is None:
        _bound = {}
        for name, variable in _FROM_ENVIRONMENT:
            if value := os.environ.get(variable):
                _bound[name] = (
                    int(value) if name in {"rank", "generation"} and value.isdecimal() else value
                )
    return _bound


def _write(level: str, name: str, fields: Mapping[str, Any]) -> None:
    # a full disk, a closed pipe or an unexpected value must not end a training
    with contextlib.suppress(Exception):
        line = render(level, name, fields, now=datetime.now(UTC))
        os.write(_STDERR, line) if _sink is None else _sink(line)


def _encode(line: Mapping[str, Any]) -> bytes:
    return encode_json(line, separators=(",", ":")).encode() + b"\n"


def plain(value: Any) -> Any:
    """Convert a value for JSON: NaN, infinities and unknown types become text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)


def _shortened(value: Any, limit: int) -> Any:
    value = plain(value)
    if isinstance(value, str) and len(value) > limit:
        return value[:limit] + "…"
    if isinstance(value, list):
        return [_shortened(item, limit) for item in value[-_SHORT_LIST:]]
    if isinstance(value, dict):
        return {
            key[:limit]: _shortened(item, limit) for key, item in list(value.items())[:_SHORT_LIST]
        }
    return value
