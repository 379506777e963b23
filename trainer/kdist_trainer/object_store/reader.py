"""Reads an object as a file, by ranges, and fetches the next ones while the last is used."""

from __future__ import annotations

import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

BLOCK_BYTES: Final = 8 << 20
READ_AHEAD: Final = 2
"""Blocks that are fetched ahead, so that a reader holds at most `READ_AHEAD` + 1 of them."""


class RangeSource(Protocol):
    """Reads part of an object."""

    def read_range(self, name: str, start: int, length: int, size: int) -> memoryview: ...


class ObjectReader(io.RawIOBase):
    """A file over one object. `readinto` fills the whole buffer except at the end; a body that was
    cut short is requested again. For one thread at a time.
    """

    def __init__(self, source: RangeSource, name: str, size: int) -> None:
        """Prepare, without a request.

        Args:
            source: the store.
            name: of the object.
            size: of the object in bytes.
        """
        super().__init__()
        self._source = source
        self._name = name
        self._size = size
        self._position = 0
        self._blocks: dict[int, Future[memoryview]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move, also behind the end. Returns the position. Raises `ValueError`."""
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        if whence not in bases or bases[whence] + offset < 0:
            raise ValueError(f"cannot seek by {offset} from {whence}")
        self._position = bases[whence] + offset
        return self._position

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Fill the buffer from the position on. Returns the number of bytes, less than its size
        only at the end. Raises `OSError`.
        """
        if self.closed:
            raise ValueError("the reader is closed")
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and self._position < self._size:
            number, offset = divmod(self._position, BLOCK_BYTES)
            piece = self._block(number)[offset : offset + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
            self._position += len(piece)
        return done

    def close(self) -> None:
        """Forget what was fetched; may be called again."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        self._blocks.clear()
        super().close()

    def _block(self, number: int) -> memoryview:
        # ahead only where the last block has been read too: who jumps would fetch for nothing
        ahead = READ_AHEAD if number == 0 or {number, number - 1} & set(self._blocks) else 0
        last = (self._size - 1) // BLOCK_BYTES
        wanted = range(number, min(number + ahead, last) + 1)
        for one in set(self._blocks) - {number - 1, *wanted}:
            self._blocks.pop(one).cancel()
        for one in wanted:
            if one not in self._blocks:
                self._blocks[one] = self._fetch(one)
        block = self._blocks[number]
        try:
            data = block.result()
        except OSError:
            # another call may succeed, so those ahead, which may have failed too, are forgotten
            self._blocks.clear()
            raise
        self._blocks.pop(number - 1, None)
        return data

    def _fetch(self, number: int) -> Future[memoryview]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READ_AHEAD + 1, "object-reader")
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, self._size - start)
        return self._threads.submit(self._source.read_range, self._name, start, length, self._size)
