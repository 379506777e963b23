"""YAML text to a tree of nodes that know their places, within limits on size and depth.

Built from PyYAML's events rather than its composer, so that depth and size are bounded before anything recurses, keys stay
the text that was written, and several mistakes are found in one pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import yaml

from kdist.errors import Problem
from kdist.load.scalars import Scalar, resolve
from kdist.load.syntax import explain
from kdist.load.text import decode, shown

MAX_DEPTH: Final = 50
MAX_NODES: Final = 20_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_START: Final = "`kdist init` writes one to start from"


class Mark(NamedTuple):
    """A place: line and column from 1, and how many columns it is wide. Line 0 is a `--set` option."""

    source: str
    line: int
    column: int
    width: int = 1


@dataclass
class Node:
    """A value and its place. Aliases share nodes, so a node is never changed once it is complete."""

    kind: str  # "mapping", "list" or "scalar"
    mark: Mark
    scalar: Scalar = None
    text: str = ""  # a scalar as it was written, without quotes
    plain: bool = False  # a scalar without quotes
    entries: dict[str, tuple[Mark, Node]] = field(default_factory=dict)
    items: list[Node] = field(default_factory=list)
    size: int = 1  # nodes below and including this one, aliases counted each time
    depth: int = 1

    def value(self) -> Any:
        """Plain Python values."""
        if self.kind == "mapping":
            return {key: node.value() for key, (_, node) in self.entries.items()}
        return [node.value() for node in self.items] if self.kind == "list" else self.scalar


class _Stop(Exception):  # noqa: N818 - no error: it carries the problem after which reading makes no sense
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def read(text: str, *, source: str) -> tuple[Node | None, list[Problem]]:
    """The tree of a job file and the problems of its YAML; no tree where what follows a mistake would be guesswork."""
    tree, problems = _parse(text, _Reader(source))
    if problems and tree is None:
        return None, problems
    if tree is None or (tree.kind == "scalar" and tree.scalar is None):
        return None, [*problems, Problem(source, 1, 1, "", "the file is empty", hint=_START)]
    if tree.kind != "mapping":
        what = "a list" if tree.kind == "list" else f"the text `{shown(tree.text, 40)}`"
        message = f"must be a mapping that begins with apiVersion and kind, found {what}"
        return None, [*problems, Problem(source, tree.mark.line, tree.mark.column, "", message, hint=_START)]
    return tree, problems


def read_value(text: str, *, source: str) -> tuple[Node | None, list[Problem]]:
    """The tree of one value that was given on the command line; its marks have line 0."""
    text, problems = decode(text, source=source)
    tree = None
    if not problems:
        tree, problems = _parse(text, _Reader(source, inline=True))
    return tree, [each._replace(line=0, column=0) for each in problems]


def _parse(text: str, reader: _Reader) -> tuple[Node | None, list[Problem]]:
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            reader.take(event)
    except _Stop as stop:
        return None, [*reader.problems, stop.problem]
    except yaml.MarkedYAMLError as error:
        return None, [*reader.problems, explain(error, text, source=reader.source)]
    return reader.document, reader.problems


class _Reader:
    """Takes events one by one; `document` is the tree when all are taken."""

    def __init__(self, source: str, *, inline: bool = False) -> None:
        self.source = source
        self._inline = inline
        self.document: Node | None = None
        self.problems: list[Problem] = []
        self._open: list[Node] = []
        self._keys: list[tuple[str, Mark] | None] = []  # the key that waits for its value, per open mapping
        self._names: list[str | None] = []  # the anchor of each open collection
        self._anchors: dict[str, Node | None] = {}
        self._nodes = 0

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent) and self.document is not None:
            raise _Stop(self._problem(event, "a second document begins here", "one job per file; move it to its own"))
        if isinstance(event, yaml.AliasEvent):
            self._add(self._alias(event), event)
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._start(event)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            node = self._open.pop()
            self._keys.pop()
            name = self._names.pop()
            if name is not None:
                self._anchors[name] = node
            self._add(node, event)

    def _problem(self, event: yaml.Event, message: str, hint: str = "") -> Problem:
        mark = self._mark(event)
        return Problem(self.source, mark.line, mark.column, "", message, hint=hint, width=mark.width)

    def _mark(self, event: yaml.Event) -> Mark:
        if self._inline:
            return Mark(self.source, 0, 0)
        start, end = event.start_mark, event.end_mark
        if start is None or end is None:  # events of a parser always have marks; those made by hand need not
            return Mark(self.source, 1, 1)
        width = end.column - start.column if end.line == start.line else 1
        return Mark(self.source, start.line + 1, start.column + 1, max(width, 1))

    def _check_properties(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
        if event.tag is not None:
            tag = shown(event.tag.replace("tag:yaml.org,2002:", "!!"), 40)
            self.problems.append(
                self._problem(event, f"the tag `{tag}` is not allowed", "job files need no tags; quote text instead")
            )
        if event.anchor is not None:
            self._anchors[event.anchor] = None

    def _start(self, event: yaml.CollectionStartEvent) -> None:
        if self._open and self._open[-1].kind == "mapping" and self._keys[-1] is None:
            raise _Stop(self._problem(event, "a key must be text", "in `{…}` and `[…]` use quotes if text is meant"))
        if len(self._open) >= MAX_DEPTH:
            raise _Stop(self._problem(event, f"nested deeper than {MAX_DEPTH} levels"))
        self._check_properties(event)
        kind = "mapping" if isinstance(event, yaml.MappingStartEvent) else "list"
        self._open.append(Node(kind, self._mark(event)._replace(width=1)))
        self._keys.append(None)
        self._names.append(event.anchor)

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        self._check_properties(event)
        plain = event.style is None
        text = event.value
        if _SURROGATE.search(text):  # JSON's way to write 😀 is two escapes, each half a character to YAML
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        node = Node("scalar", self._mark(event), text=text, plain=plain)
        waits_for_key = self._open and self._open[-1].kind == "mapping" and self._keys[-1] is None
        try:
            node.scalar = text
            if plain and not waits_for_key:
                node.scalar = resolve(text)
        except ValueError as error:
            self.problems.append(self._problem(event, str(error)))
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._add(node, event)

    def _alias(self, event: yaml.AliasEvent) -> Node:
        if event.anchor not in self._anchors:
            raise _Stop(
                self._problem(
                    event, f"the alias `*{shown(event.anchor, 40)}` has no anchor `&{shown(event.anchor, 40)}` before it"
                )
            )
        node = self._anchors[event.anchor]
        if node is None:
            raise _Stop(self._problem(event, f"the alias `*{shown(event.anchor, 40)}` lies within its own anchor"))
        if len(self._open) + node.depth > MAX_DEPTH:
            raise _Stop(self._problem(event, f"nested deeper than {MAX_DEPTH} levels by aliases"))
        return node

    def _add(self, node: Node, event: yaml.Event) -> None:
        """Put a complete node where it belongs: into the open list, as a key, as a key's value, or as the document."""
        if not self._open:
            self.document = node
            return
        parent = self._open[-1]
        if parent.kind == "mapping" and self._keys[-1] is None:
            self._keys[-1] = self._key(node, event)
            return
        parent.size += node.size
        parent.depth = max(parent.depth, node.depth + 1)
        if parent.size > MAX_NODES:
            raise _Stop(self._problem(event, f"the file holds more than {MAX_NODES} values, counting what aliases repeat"))
        waiting = self._keys[-1]
        if waiting is None:
            parent.items.append(node)
            return
        self._keys[-1] = None
        key, mark = waiting
        if key in parent.entries:
            first = parent.entries[key][0]
            message = f"the key `{shown(key)}` is already given at line {first.line}, column {first.column}"
            self.problems.append(Problem(self.source, mark.line, mark.column, "", message, hint="keep one", width=mark.width))
            return
        parent.entries[key] = (mark, node)

    def _key(self, node: Node, event: yaml.Event) -> tuple[str, Mark]:
        if node.kind != "scalar":
            raise _Stop(self._problem(event, "a key must be text"))
        mark = self._mark(event)
        if node.plain and node.text == "<<":
            hint = "it belongs to YAML 1.1; write the fields out, or use an alias for a whole section"
            self.problems.append(self._problem(event, "the merge key `<<` is not supported", hint))
        elif not node.text:
            self.problems.append(self._problem(event, "a key is empty"))
        return node.text, mark
