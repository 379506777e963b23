"""A fork of a prepared process gets memory of its own, not what imports have left between what is
shared.
"""

from __future__ import annotations

import ctypes
import os
import sys
from multiprocessing.connection import Connection

import pytest

from kdist_trainer import forked_memory
from tests.trainer.checkpoint.ranks import prepared_context

SIZES = range(24, 2000, 40)
"""Of what is freed, and then allocated."""
BLOCKS = 200
"""Of each size."""


def allocate(libc: ctypes.CDLL) -> list[int]:
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    return [libc.malloc(size) for _ in range(BLOCKS) for size in SIZES]


def make_gaps(libc: ctypes.CDLL) -> None:
    """Free every second block of many, so that they cannot be put together."""
    for block in allocate(libc)[::2]:
        libc.free(ctypes.c_void_p(block))


def share_of_gaps(libc: ctypes.CDLL, *, below: int) -> float:
    """The share of blocks that lie below an address, of as many as were freed."""
    blocks = allocate(libc)[: BLOCKS * len(SIZES) // 2]
    return sum(block < below for block in blocks) / len(blocks)


def fork_and_allocate(prepares: bool) -> float:
    """The share of what a fork allocates that lies in the gaps of its parent."""
    libc = ctypes.CDLL(None)
    make_gaps(libc)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    if prepares:
        forked_memory.share_with_forks()
    end = libc.sbrk(0)
    libc.malloc_trim(ctypes.c_size_t(0))
    read, write = os.pipe()
    if not os.fork():
        os.write(write, str(share_of_gaps(libc, below=end)).encode())
        os._exit(0)
    os.wait()
    return float(os.read(read, 100))


def tell(pipe: Connection, prepares: bool) -> None:
    pipe.send(fork_and_allocate(prepares))


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the heap is glibc's")
def test_a_fork_uses_no_gap_between_what_it_shares() -> None:
    shares = []
    for prepares in (False, True):
        context = prepared_context()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=tell, args=(theirs, prepares))
        process.start()
        shares.append(ours.recv())
        process.join()
    assert shares[0] > 0.9, "there is nothing to see"
    assert shares[1] < 0.1
