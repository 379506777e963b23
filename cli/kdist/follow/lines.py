"""Lines of pods' logs: what is an event in them, and of which ranks they are."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kdist.status import Pod

_EVENT_START = '{"time"'
_RANK = re.compile(r"\[rank(\d+)\]:")


@dataclass(frozen=True)
class Line:
    """One line that a container wrote. `stamp` is its time as the kubelet writes it; they compare as text."""

    pod: Pod
    stamp: str
    text: str

    @cached_property
    def event(self) -> dict[str, Any] | None:
        """The trainer's event in it, which may stand behind something printed without an end of line."""
        start = self.text.find(_EVENT_START)
        if start < 0:
            return None
        try:
            event = json.loads(self.text[start:])
        except (ValueError, RecursionError):
            return None
        return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None

    @property
    def printed(self) -> str:
        """What was printed, without the event and without what a progress bar wrote over."""
        text = self.text if self.event is None else self.text[: self.text.find(_EVENT_START)]
        return text.rstrip("\r").rsplit("\r", 1)[-1]

    @property
    def source(self) -> str:
        """The pod's name without the letters that a Job adds: `digits-0`."""
        index = self.pod.index
        head, _, tail = self.pod.name.rpartition("-")
        return head if index is not None and head.endswith(f"-{index}") and len(tail) == 5 else self.pod.name


class RankFilter:
    """Passes the lines of some ranks: events that name one, and what ranks print, which stands behind `[rank3]: `.

    What has no rank on it is passed if its pod holds one of them. Agents say whom they start; `known` are the ranks of each pod
    as far as they told.
    """

    def __init__(self, wanted: Collection[int], known: Mapping[str, Collection[int]]) -> None:
        self._wanted = frozenset(wanted)
        self._here: dict[str, set[int]] = {pod: set(ranks) for pod, ranks in known.items()}

    def passes(self, line: Line) -> bool:
        """Whether the line is of one of the ranks; lines of one pod must come in their order."""
        event = line.event
        printed = _RANK.match(line.text)
        rank = event.get("rank") if event else int(printed[1]) if printed else None
        if event and event["event"] == "group-formed":
            self._here[line.pod.name] = set()
        if isinstance(rank, int):
            if event and event["event"] == "worker-started":
                self._here.setdefault(line.pod.name, set()).add(rank)
            return rank in self._wanted
        return bool(self._wanted & self._here.get(line.pod.name, set()))
