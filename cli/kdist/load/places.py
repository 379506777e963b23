"""Where in the file a complaint of the model belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kdist.load.tree import Mark, Node
from kdist.spec.paths import Path


class Place(NamedTuple):
    """What a location of the model is in the file."""

    path: Path
    node: Node | None  # None where the file has nothing at that path
    key: Mark  # the key of that node, or of the nearest section that is there

    @property
    def value(self) -> Mark:
        """Where the value stands: a scalar's own place, else its key's."""
        if self.node is not None and self.node.kind == "scalar" and self.node.text:
            return self.node.mark
        return self.key


def locate(tree: Node, location: Sequence[str | int]) -> Place:
    """The place of a location of pydantic's, whose parts are names, list positions, and marks that the file does not have.

    Such marks (the branch of a union, `[key]`) are passed over, except that a last part that is a name is kept in the path:
    it is a field that is missing.
    """
    node, key, path = tree, tree.mark, list[str | int]()
    for index, part in enumerate(location):
        if isinstance(part, str) and part in node.entries:
            key, node = node.entries[part]
        elif isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            key = node.mark
        elif node.kind == "mapping" and isinstance(part, str) and part != "[key]":
            return Place((*path, *location[index:]), None, key)
        else:
            continue
        path.append(part)
    return Place(tuple(path), node, key)
