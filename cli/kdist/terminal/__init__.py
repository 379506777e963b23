"""Makes text harmless for a terminal: control characters become visible, and only styles that kdist
itself sets reach the terminal.

Text that comes from a cluster, a pod or a file may hold escape sequences, carriage returns, line
separators and marks that change the direction of writing, by which it could forge lines, hide
itself or send input to the terminal. `style` marks a style with a token that is drawn for each
process, so that no such text can have one; `to_terminal` is the only way from text to the terminal.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from typing import Final

_TOKEN: Final = secrets.token_hex(8)
_STYLE: Final = re.compile(rf"\x1b\[{_TOKEN};([0-9;]+)m")
_SGR: Final = re.compile(r"\x1b\[((?:;?[0-9]{1,3})*)m")
_COLORS: Final = ("black", "red", "green", "yellow", "blue", "magenta", "cyan")
_CODES: Final = {
    "bold": 1,
    "dim": 2,
    **{color: code for code, color in enumerate(_COLORS, 30)},
    **{f"bright_{color}": code for code, color in enumerate(_COLORS, 90)},
}


def visible(text: str, *, keep: str = "") -> str:
    """The text with what a terminal does not draw written out, but for the characters in `keep`."""
    if text.isprintable():
        return text
    return "".join(char if _is_drawn(char) or char in keep else ascii(char)[1:-1] for char in text)


def _is_drawn(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"


def visible_json(text: str) -> str:
    """A JSON document with the same meaning, in which such characters are escaped; its line breaks
    stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if _is_drawn(char) or char in "\n\t"
        else "".join(f"\\u{unit:04x}" for unit in _utf16(char))
        for char in text
    )


def _utf16(char: str) -> list[int]:
    data = char.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[start : start + 2], "big") for start in range(0, len(data), 2)]


def style(text: str, color: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """The text in a style. Without any style it is returned as it is."""
    names = [name for name, on in (("bold", bold), ("dim", dim)) if on]
    codes = [_CODES[name] for name in (*([color] if color else []), *names)]
    return f"{_mark(*codes)}{text}{_mark(0)}" if codes else text


def _mark(*codes: int) -> str:
    return f"\x1b[{_TOKEN};{';'.join(map(str, codes))}m"


def unstyle(text: str) -> str:
    """The text without styles of `style`."""
    return _STYLE.sub("", text)


def to_terminal(text: str, *, color: bool, keep: str = "") -> str:
    """What is written to a terminal or a file: styles as escape sequences if `color`, and whatever
    else is in the text visible.
    """
    parts = _STYLE.split(text)
    parts[::2] = [visible(part, keep=keep) for part in parts[::2]]
    parts[1::2] = [f"\x1b[{codes}m" if color else "" for codes in parts[1::2]]
    return "".join(parts)


def keep_colors(text: str) -> str:
    """A line that a training has printed, for `to_terminal`: its own colours stay, and end with it;
    everything else will be visible.
    """
    marked, found = _SGR.subn(lambda codes: f"\x1b[{_TOKEN};{codes[1] or 0}m", text)
    return f"{marked}{_mark(0)}" if found else text
