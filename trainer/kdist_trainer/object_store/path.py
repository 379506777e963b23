"""Names in an object store with the part of pathlib's interface that checkpoints use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from kdist_trainer.object_store.location import ObjectLocation
from kdist_trainer.object_store.store import ObjectStore, open_store

_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class ObjectPath:
    """The name of an object, or of the objects below it.

    There are no folders: one exists as long as there is an object below it. What is written is
    there at once and as a whole, for every reader.
    """

    store: ObjectStore
    key: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name; another process reads it through a client of its own."""
        return _reopen, (self.store.location, self.key)

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.store.location}/{self.key}" if self.key else str(self.store.location)

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """Without the last part; of the store itself, the store."""
        return ObjectPath(self.store, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> ObjectPath:
        """With another last part."""
        return self.parent / name

    def read_bytes(self, max_bytes: int = _MOST_BYTES) -> bytes:
        """The content. Raises `FileNotFoundError` or `OSError`."""
        return self.store.get(self.key, max_bytes).data

    def read_text(self, encoding: str = "utf-8") -> str:
        """The content as text. Raises `FileNotFoundError`, `OSError` or `UnicodeDecodeError`."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Replace the content. Raises `OSError`."""
        self.store.put(self.key, data)

    def is_dir(self) -> bool:
        """Whether there is an object below it. Raises `OSError`."""
        return bool(self.store.list(self.key))

    def exists(self) -> bool:
        """Whether it is an object. Raises `OSError`."""
        try:
            self.store.info(self.key)
        except FileNotFoundError:
            return False
        return True

    def modified_at(self) -> float:
        """When the object was written, in Unix seconds. Raises `FileNotFoundError` or `OSError`."""
        return self.store.info(self.key).modified.timestamp()

    def folders(self) -> Iterator[ObjectPath]:
        """What has objects below it, one level down. Raises `OSError`."""
        for key in self.store.list_folders(self.key):
            yield ObjectPath(self.store, key)

    def files(self) -> dict[str, int]:
        """The objects below it by their names relative to it, with their sizes in bytes. Raises
        `OSError`.
        """
        prefix = f"{self.key}/" if self.key else ""
        return {found.name[len(prefix) :]: found.size for found in self.store.list(self.key)}

    def open(self, size: int) -> IO[bytes]:
        """Open for reading, as a file that can be sought.

        Args:
            size: of the object in bytes.

        Raises:
            FileNotFoundError: there is no such object.
            OSError: the store failed.
        """
        return self.store.open(self.key, size)


def _reopen(location: ObjectLocation, key: str) -> ObjectPath:
    return ObjectPath(open_store(location), key)
