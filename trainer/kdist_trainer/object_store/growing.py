"""An object in a store that is appended to, such as a log."""

from __future__ import annotations

import time

from kdist_trainer.object_store.store import ObjectPath

FLUSH_SECONDS = 10.0
"""How long what is appended may wait to be written."""


class GrowingObject:
    """Bytes that are appended to an object. A store has no append, so each `flush` writes all of
    them again. A `with` block flushes at its end unless it raises.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._data = bytearray()
        self._written = 0
        self._flush_at = 0.0

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self._data)

    @property
    def is_written(self) -> bool:
        """Whether all of them are in the store."""
        return self._written == len(self._data)

    @property
    def seconds_to_flush(self) -> float | None:
        """How long what is appended may still wait; None if all is written."""
        return None if self.is_written else max(0.0, self._flush_at - time.monotonic())

    def write(self, data: bytes) -> int:
        """Append bytes, which the next `flush` writes. Returns their number."""
        if self.is_written:
            self._flush_at = time.monotonic() + FLUSH_SECONDS
        self._data += data
        return len(data)

    def flush(self) -> None:
        """Write it, if it has grown. Raises `OSError`."""
        if not self.is_written:
            self._flush_at = time.monotonic() + FLUSH_SECONDS  # also after an error
            self._path.write_bytes(bytes(self._data))
            self._written = len(self._data)

    def __enter__(self) -> GrowingObject:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.flush()
