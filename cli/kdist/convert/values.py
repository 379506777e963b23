"""The values of a manifest with their positions, and what became of each one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kdist.errors import Problem
from kdist.job_file.yaml_parser import Mark, YamlNode
from kdist.spec.reference import Path, show

KEPT, IN_POD, LEFT_OUT, NEEDLESS = "kept", "podTemplate", "leftOut", "needless"
"""A value becomes a field of job.yaml or a part of its `podTemplate`, or is left out; what is
needless is left out too, and the job is the same without it.
"""


class ValueOutcome(NamedTuple):
    """What became of a value: one of `KEPT` to `NEEDLESS`, and the field, or the reason."""

    kind: str
    text: str


@dataclass
class Outcomes:
    """What became of the values of a workload: outcomes, each for all below its value; what means
    something else in the job; and what kdist's own rules refuse.
    """

    found: dict[Path, tuple[InputValue, ValueOutcome]] = field(default_factory=dict)
    changes: list[Problem] = field(default_factory=list)
    refused: dict[Path, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)  # of the file


@dataclass(frozen=True)
class InputValue:
    """A value of a manifest, or the place where it would be; false if it is absent or null."""

    node: YamlNode | None
    mark: Mark
    outcomes: Outcomes
    path: Path = ()

    def __bool__(self) -> bool:
        return self.node is not None and (
            self.node.kind != "scalar" or self.node.scalar is not None
        )

    def get(self, dotted: str) -> InputValue:
        """The value below these keys; false if there is none."""
        found = self
        for name in dotted.split("."):
            found = found.entry(name)
        return found

    def entry(self, name: str) -> InputValue:
        """The value of a key, which may contain dots."""
        entry = None if self.node is None else self.node.entries.get(name)
        mark, node = entry or (self.mark, None)
        return replace(self, node=node, mark=mark, path=(*self.path, name))

    def item(self, index: int, node: YamlNode) -> InputValue:
        """A value of a list, or a part of a text."""
        return replace(self, node=node, mark=node.mark, path=(*self.path, index))

    def below(self) -> list[InputValue]:
        if self.node is None or self.node.kind == "mapping":
            return [self.entry(name) for name in (self.node.entries if self.node else ())]
        return [self.item(index, node) for index, node in enumerate(self.node.items)]

    def leaves(self) -> Iterator[InputValue]:
        """All scalars and empty collections of it."""
        below = self.below()
        for each in below:
            yield from each.leaves()
        if self.node is not None and not below:
            yield self

    @property
    def key(self) -> str:
        return str(self.path[-1])

    @property
    def text(self) -> str:
        """A scalar as it is written, without quotes; empty for all else."""
        return self.node.text if self.node is not None else ""

    @property
    def number(self) -> int:
        """The whole number, also if it is written as text; 0 if it is none."""
        return int(self.text) if re.fullmatch("[0-9]{1,9}", self.text) else 0

    def value(self) -> Any:
        """Plain values; Kubernetes reads numbers that begin with 0 in base 8, as YAML 1.1 does."""
        if self.node is None or self.node.kind == "scalar":
            is_octal = self.node is not None and self.node.plain and re.match("0[0-7]+$", self.text)
            return int(self.text, 8) if is_octal else self.node.scalar if self.node else None
        if self.node.kind == "mapping":
            return {each.key: each.value() for each in self.below()}
        return [each.value() for each in self.below()]

    def problem(self, message: str) -> Problem:
        return self.mark.problem(message, path=show(self.path))

    def keep(self, target: str) -> None:
        """Record the field that has it, or what of kdist's does the same."""
        settle([self], ValueOutcome(KEPT, target))

    def leave(self, why: str, *, needless: bool = False) -> None:
        """Record that it is left out."""
        settle([self], ValueOutcome(NEEDLESS if needless else LEFT_OUT, why))

    def change(self, message: str) -> None:
        """Record what means something else in the job."""
        self.outcomes.changes.append(self.problem(message))

    @property
    def outcome(self) -> ValueOutcome | None:
        """What became of it, as recorded for it or for the nearest value that contains it."""
        found = self.outcomes.found
        paths = (self.path[:end] for end in range(len(self.path), -1, -1))
        return next((found[path][1] for path in paths if path in found), None)


def settle(values: Sequence[InputValue], outcome: ValueOutcome) -> None:
    """Record one outcome of several values; of those that are absent none."""
    for each in values:
        if each.node is not None:
            each.outcomes.found[each.path] = each, outcome
