"""Keeps a process working when it has no file descriptor left: raises its limit, and holds a few
descriptors in reserve for what must go on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable
from typing import Final, TypeVar

_RESERVED: Final = 8
_ATTEMPTS: Final = 3
_MOST: Final = 1 << 20
"""Some programs close each descriptor below the limit, and a container's may be a thousand times
as many.
"""
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""This process, or the whole machine, has no descriptor left."""

_held: list[int] = []
_lock = threading.Lock()
_Result = TypeVar("_Result")


def raise_limit() -> int:
    """Raise this process's limit of open files as far as it may; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have a lower maximum
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    """The number of files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def reserve() -> None:
    """Hold descriptors in reserve, as far as there are any; `spend` gives them."""
    with _lock:
        _fill()


def spend(action: Callable[[], _Result]) -> _Result:
    """Return what `action` does, with the reserve at its disposal if there is no other descriptor.
    Raises `OSError` if the reserve is not enough, or for another reason of the action's.
    """
    for _ in range(_ATTEMPTS):
        try:
            return action()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
        with _lock:
            while _held:
                os.close(_held.pop())
            try:
                return action()
            except OSError as error:
                # another thread may have taken what was given back
                if error.errno not in EXHAUSTED:
                    raise
            finally:
                _fill()
    return action()


def _fill() -> None:
    """Take descriptors until the reserve is full; the caller holds the lock."""
    with contextlib.suppress(OSError):  # the next call takes what there is then
        while len(_held) < _RESERVED:
            _held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
