"""A cluster whose API server, pods and logs say what nobody should: escape sequences and line ends
in every text, other types than agreed, texts of megabytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.cli.cluster.api import Asked, Reply
from tests.cli.situations.cluster import Cluster

FORGED: Final = "FORGED: all is well"
TITLE: Final = "\x1b]0;owned\x07"
BLINK: Final = "\x1b[31;5;7m"
POISON: Final = f"{TITLE}{BLINK}\x9b2J\x7f\u202e\u2028\x85\x00\r\n{FORGED}\r{FORGED}\n{FORGED}\n"
_IDENTITY: Final = frozenset(
    {"name", "namespace", "uid", "kind", "apiVersion", "resourceVersion", "controller", "version"}
)
"""What an API server checks itself, or by which objects are found at all."""
_ODD: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 10**300, 1e308, "", "x", "\u0661", [], {}, [None], [[]], {"": None}),
    *("2026-13-45T99:99:99Z", "9999-12-31T23:59:59+14:00", "NaN", "\ud800", "a" * 100_000),
)

Change = Callable[[Any], Any]


def poison(value: Any) -> Any:
    """The text, followed by what a terminal would obey."""
    return f"{value}{POISON}" if isinstance(value, str) else value


def confuse(seed: str) -> Change:
    """One value in ten becomes another one, of any type."""
    drawn = random.Random(seed)
    return lambda value: drawn.choice(_ODD) if drawn.random() < 0.1 else value


class HostileCluster(Cluster):
    """A cluster that turns hostile once `change` is set, which is applied to each value."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.change: Change | None = None

    def __call__(self, asked: Asked) -> Reply:
        reply = super().__call__(asked)
        change = self.change
        if change is None or asked.path in ("/api", "/apis"):
            return reply
        lines = None if reply.lines is None else [_encodable(change(each)) for each in reply.lines]
        assert not callable(reply.channels)
        channels = None if reply.channels is None else dict(reply.channels)
        for number in channels or {}:
            if number in (1, 2) and channels:
                channels[number] += str(change("")).encode(errors="replace")
        document = _apply(change, reply.document)
        return replace(reply, document=document, lines=lines, channels=channels)


def _encodable(value: Any) -> str:
    return str(value).encode(errors="replace").decode()


def _apply(change: Change, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: each if key in _IDENTITY else _apply(change, each) for key, each in value.items()
        }
    if isinstance(value, list):
        return [_apply(change, each) for each in value]
    return change(value)
