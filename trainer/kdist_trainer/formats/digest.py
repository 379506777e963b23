"""Digests of files and objects: the algorithm that is written, and those that can be verified. Free
of torch.

They detect damage, not an attacker. So a fast algorithm is enough: a digest is computed on the
thread that writes the file, on cores that the training needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import xxhash

WRITTEN: Final = "xxh3_128"
Data = bytes | bytearray | memoryview


class Hasher(Protocol):
    """Computes a digest of data that is passed in pieces."""

    def update(self, data: Data, /) -> None: ...
    def hexdigest(self) -> str: ...


_HASHERS: Final[Mapping[str, Callable[[], Hasher]]] = {
    WRITTEN: xxhash.xxh3_128,
    "sha256": hashlib.sha256,  # of manifests of format 1
}


class UnknownAlgorithmError(Exception):
    """A digest is of an algorithm that this version cannot compute; the message is its name."""


@dataclass(frozen=True)
class Digest:
    """A file's size in bytes and its digest in hexadecimal."""

    size: int
    value: str
    algorithm: str = WRITTEN

    @classmethod
    def of(cls, data: Data) -> Digest:
        """The digest of a whole file."""
        hasher = new_hasher()
        hasher.update(data)
        return cls(memoryview(data).nbytes, hasher.hexdigest())

    def to_json(self) -> dict[str, Any]:
        """The digest as a manifest has it: by the name of its algorithm."""
        return {"size": self.size, self.algorithm: self.value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Digest:
        """Read what `to_json` returned. Raises `UnknownAlgorithmError`, or `ValueError` if it is
        something else.
        """
        values = dict(document)
        size = values.pop("size", None)
        if type(size) is not int or len(values) != 1:
            raise ValueError("a file has one size and one digest")
        algorithm, value = values.popitem()
        if algorithm not in _HASHERS:
            raise UnknownAlgorithmError(algorithm)
        if not isinstance(value, str):
            raise ValueError("a digest is text")
        return cls(size, value, algorithm)

    def hasher(self) -> Hasher:
        """A hasher that is fed with a file to compare it with this digest."""
        return new_hasher(self.algorithm)

    def matches(self, data: Data) -> bool:
        """Whether `data` is the content of the file, to the bit."""
        found = self.hasher()
        found.update(data)
        return found.hexdigest() == self.value


def new_hasher(algorithm: str = WRITTEN) -> Hasher:
    """A hasher without data."""
    return _HASHERS[algorithm]()
