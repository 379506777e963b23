"""Lines of pods' logs, and the selection of lines by rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from kdist.events import Event, ParsedLine, split_line
from kdist.status import Pod

_RANK_PREFIX = re.compile(r"\[rank(\d{1,9})\]:")


@dataclass(frozen=True)
class PodLine:
    """One line that a container wrote.

    Attributes:
        pod: the pod of the container.
        stamp: time of the line as the kubelet writes it; stamps compare as text.
        text: the line without its stamp and newline.
    """

    pod: Pod
    stamp: str
    text: str

    @cached_property
    def _parsed(self) -> ParsedLine:
        return split_line(self.text)

    @property
    def event(self) -> Event | None:
        """The trainer's event in the line; None if it holds none."""
        return self._parsed.event

    @property
    def printed(self) -> str:
        """The printed text, without the event and without what a progress bar has overwritten."""
        return self._parsed.printed

    @property
    def source(self) -> str:
        """The pod's name without the random suffix that a Job adds: `digits-0`."""
        index = self.pod.index
        head, _, suffix = self.pod.name.rpartition("-")
        has_suffix = index is not None and head.endswith(f"-{index}") and len(suffix) == 5
        return head if has_suffix else self.pod.name


class RankFilter:
    """Selects the lines of some ranks: events that name their rank, and prints, which the agent
    prefixes with `[rank3]: `.

    A line without a rank is selected if its pod runs one of the ranks. Which pod runs which ranks
    is learned from the agents' own events.

    Args:
        wanted: the ranks to select.
        known: ranks of each pod, as far as known before the first line.
    """

    def __init__(self, wanted: Collection[int], known: Mapping[str, Collection[int]]) -> None:
        self._wanted = frozenset(wanted)
        self._ranks_of_pod: dict[str, set[int]] = {pod: set(ranks) for pod, ranks in known.items()}

    def matches(self, line: PodLine) -> bool:
        """Whether the line belongs to a selected rank. Pass the lines of one pod in their order."""
        event = line.event
        prefix = _RANK_PREFIX.match(line.text)
        rank = event.get("rank") if event else int(prefix[1]) if prefix else None
        if event and event["event"] == "rendezvous-completed":
            self._ranks_of_pod[line.pod.name] = set()
        if isinstance(rank, int):
            if event and event["event"] == "worker-started":
                self._ranks_of_pod.setdefault(line.pod.name, set()).add(rank)
            return rank in self._wanted
        return bool(self._wanted & self._ranks_of_pod.get(line.pod.name, set()))
