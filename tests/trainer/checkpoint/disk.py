"""A disk as a crash leaves it: what was synced is there, of the rest each piece is there, lost or
garbled, independently.

It is fed with the operations that `files` shows, keeps for every folder and file what is durable
and what is only pending, and lays down on a real folder one of the many states that a crash may
leave.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kdist_trainer.checkpoint.storage import Operation

Fate = Literal["kept", "lost", "garbled"]


@dataclass(eq=False)
class Node:
    """A file (`content` not None) or a folder."""

    content: list[bytes] | None = None  # its writes, one after the other
    synced: int = 0  # so many of them are durable
    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[Callable[[dict[str, Node]], None]] = field(default_factory=list)

    def change(self, edit: Callable[[dict[str, Node]], None]) -> None:
        """Change a folder's names; durable once the folder is synced."""
        edit(self.entries)
        self.pending.append(edit)

    def sync(self) -> None:
        """Fsync of this file or folder."""
        if self.content is not None:
            self.synced = len(self.content)
        else:
            self.durable = dict(self.entries)
            self.pending = []


class Disk:
    """The disk below `root`, beginning with what is there, all of it durable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _scan(root)

    def apply(self, operation: Operation) -> None:
        """Do an operation, volatile until it is synced."""
        if not operation.path.is_relative_to(self.root):
            return
        path = operation.path
        match operation.name:
            case "write":
                content = self._node(path).content
                assert content is not None
                content.append(operation.data)
            case "fsync" | "fsync_folder":
                self._node(path).sync()
            case "create":
                _link(self._node(path.parent), path.name, Node(content=[]))
            case "make_folder":
                _link(self._node(path.parent), path.name, Node())
            case "rename" | "replace":
                assert operation.target is not None
                assert operation.target.parent == path.parent, (
                    "only renames within a folder are modelled"
                )
                _move(self._node(path.parent), path.name, operation.target.name)
            case "remove":
                _unlink(self._node(path.parent), path.name)
            case "remove_tree":
                if path.name in self._node(path.parent).entries:
                    self._remove_tree(path)
            case name:
                raise AssertionError(f"the disk does not know {name}")

    def crash(self, decide: Callable[[bool], Fate], target: Path) -> None:
        """Lay down at `target` what the disk holds after a crash; `decide(is_write)` says what
        becomes of each pending piece.
        """
        _lay_down(self.top, decide, target)

    def pending(self) -> int:
        """How many pieces a crash would have to decide on."""
        return _pending(self.top)

    def _node(self, path: Path) -> Node:
        node = self.top
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def _remove_tree(self, path: Path) -> None:
        node = self._node(path)
        for name, child in list(node.entries.items()):
            if child.content is None:
                self._remove_tree(path / name)
            else:
                _unlink(node, name)
        _unlink(self._node(path.parent), path.name)


def _link(folder: Node, name: str, node: Node) -> None:
    folder.change(lambda entries: entries.__setitem__(name, node))


def _unlink(folder: Node, name: str) -> None:
    def edit(entries: dict[str, Node]) -> None:
        entries.pop(name, None)

    folder.change(edit)


def _move(folder: Node, name: str, target: str) -> None:
    node = folder.entries[name]

    def edit(entries: dict[str, Node]) -> None:
        entries.pop(name, None)
        entries[target] = node

    folder.change(edit)


def _scan(path: Path) -> Node:
    node = Node()
    for entry in path.iterdir():
        node.entries[entry.name] = (
            Node(content=[entry.read_bytes()], synced=1) if entry.is_file() else _scan(entry)
        )
    node.durable = dict(node.entries)
    return node


def _pending(node: Node) -> int:
    if node.content is not None:
        return len(node.content) - node.synced
    children = {id(child): child for child in (*node.entries.values(), *node.durable.values())}
    return len(node.pending) + sum(map(_pending, children.values()))


def _lay_down(node: Node, decide: Callable[[bool], Fate], target: Path) -> None:
    if node.content is not None:
        target.write_bytes(_content(node.content, node.synced, decide))
        return
    target.mkdir()
    names = dict(node.durable)
    for edit in node.pending:
        if decide(False) == "kept":
            edit(names)
    for name, child in names.items():
        _lay_down(child, decide, target / name)


def _content(writes: list[bytes], synced: int, decide: Callable[[bool], Fate]) -> bytes:
    """What is left of a file: a lost write leaves zeros if something was written behind it, a
    garbled one leaves noise.
    """
    content = bytearray(b"".join(writes[:synced]))
    position = len(content)
    for data in writes[synced:]:
        fate = decide(True)
        if fate != "lost":
            content.extend(b"\0" * (position - len(content)))
            content.extend(data if fate == "kept" else random.Random(position).randbytes(len(data)))
        position += len(data)
    return bytes(content)
