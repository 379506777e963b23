"""Decodes a job file: at most 1 MiB of UTF-8 without control characters. Lines are counted as YAML
counts them.
"""

from __future__ import annotations

import re
from typing import Final

from kdist.errors import Problem
from kdist.terminal_text import visible

MAX_BYTES: Final = 1024 * 1024
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")


def decode(data: str | bytes, *, source: str) -> tuple[str, list[Problem]]:
    """Decode a job file. Returns the text, or an empty text and the problem."""

    def refuse(
        message: str, *, line: int = 1, column: int = 1, hint: str = ""
    ) -> tuple[str, list[Problem]]:
        return "", [Problem(source, line, column, "", message, hint=hint)]

    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > MAX_BYTES:
        return refuse(
            "the file is larger than 1 MiB",
            hint="a job file describes a job; put data and code elsewhere",
        )
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or (
        len(raw) >= 2 and 0 in raw[:2] and raw[:2] != b"\x00\x00"
    ):
        return refuse("the file is UTF-16, but a job file is UTF-8", hint="save it as UTF-8")
    try:
        text = raw.removeprefix(b"\xef\xbb\xbf").decode(
            "utf-8", "surrogatepass" if isinstance(data, str) else "strict"
        )
    except UnicodeDecodeError as error:
        line, column = _position(raw[: error.start].decode("utf-8", "replace"))
        return refuse(
            f"byte 0x{raw[error.start]:02x} is not UTF-8",
            line=line,
            column=column,
            hint="save the file as UTF-8",
        )
    found = re.search("\0", text) or _FORBIDDEN.search(text)
    if found:
        line, column = _position(text[: found.start()])
        code = ord(found[0])
        what = (
            "a NUL character: this is not a text file"
            if code == 0
            else f"the control character U+{code:04X}"
        )
        return refuse(
            f"the file contains {what}",
            line=line,
            column=column,
            hint="delete it" if code else "is it the right file? `kdist init` writes a job.yaml",
        )
    return text, []


def split_lines(text: str) -> list[str]:
    """Split text into lines as YAML does."""
    return _LINE_BREAK.split(text)


def _position(before: str) -> tuple[int, int]:
    """Line and column that follow this text."""
    lines = split_lines(before.removeprefix("\ufeff"))
    return len(lines), len(lines[-1]) + 1


def shown(value: object, limit: int = 60) -> str:
    """A value as one short line without control characters, which is safe for a terminal."""
    text = visible(str(value)[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "…"
