"""Paths to fields: format, parse, and suggest the path that a misspelled one was meant as."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from kdist.spec import reference

Path: TypeAlias = tuple[str | int, ...]
_PART = re.compile(
    r"""\.?(?:(?P<name>[^.\[\]"'=\s]+)|\[(?P<index>[0-9]{1,6})\]|\[(?P<quote>["'])(?P<key>[^"']+)(?P=quote)\])"""
)
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


def show(path: Sequence[str | int]) -> str:
    """`("spec", "env", 0, "name")` → `spec.env[0].name`; other keys are quoted in
    brackets.
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.match(part) and len(part) <= 64:
            text += f".{part}" if text else part
        else:
            clean = "".join(char if char.isprintable() else "?" for char in part[:64])
            text += f'["{clean}"]'
    return text


def parse(text: str) -> Path | None:
    """`a.b[0]` → `("a", "b", 0)`; None if it is not a path."""
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        found = _PART.match(text, position)
        if found is None or (position == 0 and text[0] == "."):
            return None
        parts.append(int(found["index"]) if found["index"] else found["name"] or found["key"])
        position = found.end()
    return tuple(parts) or None


def near_name(word: str, names: Iterable[str]) -> str:
    """The name that is similar to a word, ignoring case and separators; empty if there is none."""
    from difflib import get_close_matches

    by_letters = {_letters(name): name for name in names}
    letters = _letters(word[:64])
    prefixed = [
        name
        for known, name in by_letters.items()
        if min(len(known), len(letters)) >= 3 and _shares_prefix(letters, known)
    ]
    near = get_close_matches(letters, by_letters, n=1, cutoff=0.7)
    return by_letters[near[0]] if near else prefixed[0] if len(prefixed) == 1 else ""


def near_path(path: Sequence[str | int]) -> str:
    """The path that a misspelled one was probably meant as: a similar name in the section, else the
    same name in another section; empty if there is none.
    """
    good: list[str | int] = []
    for index, part in enumerate(path):
        field = reference.find(good)
        if field is None:
            return ""
        known = isinstance(part, int) or part in field.children or field.entry is not None
        if known:
            good.append(part)
            continue
        near = near_name(str(part), field.children)
        if near:
            return (
                show([*good, near, *path[index + 1 :]])
                if reference.find([*good, near, *path[index + 1 :]])
                else show([*good, near])
            )
        return elsewhere(str(part))
    return ""


def elsewhere(name: str) -> str:
    """Path of the only field of that name in the whole file; empty if there is none or several."""
    found = [
        field.path for field in reference.root().walk() if _letters(field.name) == _letters(name)
    ]
    return found[0] if len(found) == 1 else ""


def _shares_prefix(word: str, other: str) -> bool:
    return word.startswith(other) or other.startswith(word)


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()
