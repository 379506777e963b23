"""Prometheus' text format, as far as the agents speak it: from text to samples and back. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*(?P<name>[a-zA-Z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@dataclass(frozen=True)
class Sample:
    """One number: the series' name, its labels, its value (which may be NaN)."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> Iterator[Sample]:
    """The samples in `text`; lines that are none are passed over, because they come from a pod."""
    for line in text.splitlines():
        found = None if line.startswith("#") else _match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        labels = {one["name"]: _plain(one["value"]) for one in _LABEL.finditer(found["labels"] or "")}
        yield Sample(found["name"], labels, value)


def merge(pages: Mapping[str, str], *, label: str = "pod") -> Iterator[str]:
    """The pages of several agents as one, line by line: each series gets a `label` that says whose it is.

    Help and type of a metric are said once, and its series stand together, as the format wants it.
    """
    comments: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for owner, page in pages.items():
        family = ""
        for line in page.splitlines():
            words = line.split(" ", 3)
            if line.startswith("# ") and len(words) > 2 and line.isprintable():
                family = words[2]
                known = comments.setdefault(family, [])
                if not any(one.split(" ", 3)[1] == words[1] for one in known):
                    known.append(line)
            elif found := _match(line):
                key = family if found["name"].startswith(family) and family else found["name"]
                series.setdefault(key, []).append(_with_label(found, label, owner))
    for family in dict.fromkeys([*comments, *series]):
        yield from comments.get(family, ())
        yield from series.get(family, ())


def _match(line: str) -> re.Match[str] | None:
    return _LINE.fullmatch(line.strip()) if line.isprintable() else None  # what a pod sends may end up on a terminal


def _with_label(found: re.Match[str], label: str, owner: str) -> str:
    given = (found["labels"] or "").rstrip(",")
    return f'{found["name"]}{{{given}{"," if given else ""}{label}="{owner}"}} {found["value"]}'


def to_document(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """The samples for programs; values that JSON cannot hold are words."""
    return [
        {
            "name": sample.name,
            "labels": dict(sample.labels),
            "value": sample.value if math.isfinite(sample.value) else str(sample.value),
        }
        for sample in samples
    ]


def _plain(text: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found.group(), found.group()), text)
