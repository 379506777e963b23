"""A fork of a prepared process gets memory of its own, not what imports have left between what is
shared.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.processes import script_forkserver
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
        script_forkserver.share_with_forks()
    end = libc.sbrk(0)
    libc.malloc_trim(ctypes.c_size_t(0))
    read, write = os.pipe()
    if not os.fork():
        os.write(write, str(share_of_gaps(libc, below=end)).encode())
        os._exit(0)
    os.wait()
    return float(os.read(read, 100))


def give_back() -> tuple[int, int]:
    """The pages of a process that has freed all but every hundredth of many blocks, before and
    after it gives back what is free.
    """
    libc = ctypes.CDLL(None)
    for number, block in enumerate(allocate(libc)):
        if number % 100:
            libc.free(ctypes.c_void_p(block))
    before = count_pages()
    script_forkserver.return_free_memory()
    return before, count_pages()


def count_pages() -> int:
    """The pages of this process that are in memory, whoever shares them."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def tell(pipe: Connection, find: Callable[..., object], *arguments: bool) -> None:
    pipe.send(find(*arguments))


def ask(find: Callable[..., object], *arguments: bool) -> Any:
    """What a function returns in a process of its own."""
    context = prepared_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(theirs, find, *arguments))
    process.start()
    found = ours.recv()
    process.join()
    return found


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the heap is glibc's")
def test_a_fork_uses_no_gap_between_what_it_shares() -> None:
    shares = [ask(fork_and_allocate, prepares) for prepares in (False, True)]
    assert shares[0] > 0.9, "there is nothing to see"
    assert shares[1] < 0.1


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the heap is glibc's")
def test_what_is_free_between_what_is_used_goes_back_to_the_system() -> None:
    before, after = ask(give_back)
    assert (before - after) * os.sysconf("SC_PAGE_SIZE") > BLOCKS * sum(SIZES) / 2
