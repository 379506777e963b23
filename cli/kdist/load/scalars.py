"""Plain scalars as YAML 1.2's core schema resolves them, and hints for text that YAML 1.1 reads as
numbers.
"""

from __future__ import annotations

import re
from typing import Final

_INT = re.compile(r"[-+]?[0-9]+\Z")
_OCTAL = re.compile(r"0o[0-7]+\Z")
_HEX = re.compile(r"0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NO_FINITE = re.compile(r"([-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN)\Z")
_SEXAGESIMAL = re.compile(r"[0-9]+(:[0-5]?[0-9])+\Z")
_UNDERSCORED = re.compile(r"[-+]?[0-9]+(_[0-9]+)+\Z")
_DURATION = re.compile(r"([0-9]+) ?(s|sec|secs|seconds?|m|min|mins|minutes?|h|hours?|d|days?)\Z")
_DURATION_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_DIGITS: Final = 64

Scalar = None | bool | int | float | str


def resolve(text: str) -> Scalar:
    """Value of a plain (unquoted) scalar. Raises `ValueError` with a message for numbers that no
    field can have.
    """
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if not (text[0].isascii() and (text[0].isdigit() or text[0] in "+-.")):
        return text
    if _NO_FINITE.match(text):
        raise ValueError(f"{text} is not a finite number")
    for pattern, base in ((_INT, 10), (_OCTAL, 8), (_HEX, 16)):
        if pattern.match(text):
            if len(text) > _MAX_DIGITS:
                raise ValueError(f"the number has more than {_MAX_DIGITS} digits")
            return int(text, base)
    if _FLOAT.match(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise ValueError(f"the number {text[:40]} is too large")
        return number
    return text


def number_hint(text: str, *, plain: bool) -> str:
    """How to write the number that a text was probably meant as; empty if there is none."""
    if len(text) > _MAX_DIGITS:
        return ""
    if _SEXAGESIMAL.match(text):
        total = 0
        for part in text.split(":"):
            total = total * 60 + int(part)
        return (
            f"`{text}` is text in YAML 1.2; YAML 1.1 reads it as {total} in base 60: write {total}"
        )
    if _UNDERSCORED.match(text):
        return f"`{text}` is text in YAML 1.2; write {text.replace('_', '')}"
    if (seconds := _seconds(text)) is not None:
        return f"the field counts seconds; write {seconds}"
    if not plain:
        try:
            number = resolve(text)
        except ValueError:
            return ""
        if isinstance(number, int | float) and not isinstance(number, bool):
            return f"quotes make it text; write {text} without them"
    return ""


def interval_hint(text: str) -> str:
    """How to write an interval, in seconds if the text is a duration such as `5m`."""
    seconds = _seconds(text)
    return f"write {{seconds: {seconds}}}" if seconds else "write {seconds: 300} or {steps: 100}"


def _seconds(text: str) -> int | None:
    """The seconds of a duration; None if the text is none."""
    found = _DURATION.match(text)
    if not found or len(found[1]) >= _MAX_DIGITS:
        return None
    return int(found[1]) * _DURATION_SECONDS[found[2][0]]
