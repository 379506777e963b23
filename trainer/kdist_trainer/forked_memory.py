"""Prepares the memory of a process that ranks are forked from: what a rank needs beyond that is
memory of its own, used again and again.

A fork shares its parent's pages until it writes to one, which is copied then. What imports have
freed lies as small gaps between what they have left. glibc hands the gaps out in turn, the oldest
one first: a rank that allocates much for a moment, as one does that leaves its group and joins the
next, would write to other pages each time, and own a few more of them with every loss of a rank.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress

_SIZES = tuple(2**power for power in range(16, 9, -1)) + tuple(range(504, 8, -16))
"""Of the blocks that fill the gaps, the largest first; of small gaps, each has its own size."""
_MOST_BLOCKS = 1_000_000
"""A limit, should the heap not be what it is taken for."""


def share_with_forks() -> None:
    """Have forks of this process write to few of its pages. Called once, after all imports."""
    gc.collect()
    gc.freeze()  # garbage collection in a fork then writes to none of them
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library, with another heap
            _fill_gaps(ctypes.CDLL(None))


def return_free_memory() -> None:
    """Give the system what is free in this process, also between what is in use. glibc keeps it: in
    the heap and in sixteen more that threads use, of which each group of ranks starts others.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _fill_gaps(libc: ctypes.CDLL) -> None:
    """Allocate all free memory of the heap below its end, and keep it: none of it is used again,
    and its pages stay as they are.
    """
    libc.gnu_get_libc_version  # noqa: B018 - raises where the heap is not glibc's
    allocate, free = libc.malloc, libc.free
    allocate.restype, allocate.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    free.restype, free.argtypes = None, (ctypes.c_void_p,)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    libc.malloc_trim(ctypes.c_size_t(0))  # so that what is free at the end is short
    limit = (libc.sbrk(0) or 0) - _free_at_end(libc)
    blocks = 0
    for size in _SIZES:
        while blocks < _MOST_BLOCKS and (block := allocate(size)) is not None:
            if block >= limit:  # no gap is as large any more; mappings are above the heap, too
                free(block)
                break
            blocks += 1


class _Mallinfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = tuple((f"part_{number}", ctypes.c_size_t) for number in range(10))
    part_9: int


def _free_at_end(libc: ctypes.CDLL) -> int:
    """The bytes that are free at the end of the heap, in one piece."""
    libc.mallinfo2.restype = _Mallinfo
    return int(libc.mallinfo2().part_9)
