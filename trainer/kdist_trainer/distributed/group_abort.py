"""Aborts the process groups of this rank, so that it can leave a worker group whose other ranks are
dead or silent.

gloo has no abort: a collective whose peer falls silent raises only after the group's timeout. A
rank therefore shuts down the connections of its groups itself, which makes most collectives raise
within milliseconds, here and on the peers. Some do not: gloo (torch 2.13, transport/tcp/pair.cc,
`signalException`) forgets those of which it has received or sent a part. So nothing of kdist waits
for a collective in a way that cannot be interrupted: waits are short and repeated
(`raise_if_aborted`), and a future that C++ waits for is one of our own (`register`).

Only sockets that were opened while a group was made are touched, never those of the user or of the
metrics. They are known by their inodes, since a descriptor's number is used again. Linux only.

gloo listens for as long as a group is held, and authenticates nobody. It needs no more connections
once a group is made. What becomes of a group that was left is in `left_groups`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kdist_trainer.errors import PeersLostError
from kdist_trainer.network.socket_filter import attach_filter, open_copy
from kdist_trainer.processes.threads import thread_ids

if TYPE_CHECKING:  # torch takes a second to import
    from torch.distributed import ProcessGroup

_DESCRIPTORS = Path("/proc/self/fd")
_CONNECT_TIMEOUT = timedelta(seconds=3)
"""gloo waits this long for a rank's address, and five times as long for a connection
(transport/tcp/pair.cc, `waitUntilConnected`).
"""

_recorded: set[str] = set()
"""The sockets of all groups so far, as the kernel names them: `socket:[INODE]`."""
_before: list[set[str]] = []
"""The sockets that were open when `recording` began, for each `with` block that has not ended."""
_aborted = threading.Event()
_enabled = threading.Event()
_futures: set[Any] = set()
"""Futures that the main thread may wait for in C++."""


class MadeGroup(NamedTuple):
    """What is known of a process group that may be aborted."""

    threads: set[int]
    """The native threads that were started for it."""
    timeout: timedelta
    """Timeout of its collectives."""


_made: dict[ProcessGroup, MadeGroup] = {}


def is_supported() -> bool:
    """Whether this system tells which sockets a process has open."""
    return _DESCRIPTORS.is_dir()


def enable() -> None:
    """Have all waits for collectives of gloo be such that `abort` ends them, from now on."""
    _enabled.set()


def is_enabled() -> bool:
    """Whether the process groups of this rank may be aborted."""
    return _enabled.is_set()


@contextmanager
def recording() -> Iterator[None]:
    """Record the sockets that are opened within the `with` block as those of a process group."""
    before = set(_open_sockets().values())
    _before.append(before)
    try:
        yield
    finally:
        _recorded.update(set(_open_sockets().values()) - before)
        _before.pop()


def make_group(
    make: Callable[[timedelta], Any], timeout: timedelta, *, connects_later: bool = False
) -> ProcessGroup:
    """Make a process group of ranks that have just met, and record its sockets. `make` gets the
    timeout of the group's collectives. Raises `RuntimeError` if not all ranks are connected in
    time.

    If a rank has died since they met, gloo waits for its connection in a way that cannot be
    interrupted: there is no socket yet that could be shut down. So where groups may be aborted, it
    gets a few seconds to connect instead of a multiple of the collectives' timeout.
    `connects_later` says whether its ranks connect once more later, as NCCL's do. Otherwise nobody
    can any more.
    """
    before, threads = set(_recorded), thread_ids()
    with recording():
        group: ProcessGroup = make(min(timeout, _CONNECT_TIMEOUT) if is_enabled() else timeout)
    if not connects_later:
        made = _recorded - before  # those that listen drop what arrives to open a connection
        for descriptor, name in _open_sockets().items():
            if name in made:
                with suppress(OSError), open_copy(descriptor) as own:
                    if _is_listening(own):
                        attach_filter(descriptor, own.family, ())
    if is_enabled():
        group.set_timeout(timeout)
        _made[group] = MadeGroup(thread_ids() - threads, timeout)
    return group


def describe(group: ProcessGroup) -> MadeGroup | None:
    """What is known of a group; None if `make_group` has not made it, or it cannot be aborted."""
    return _made.get(group)


def abort() -> None:
    """Shut down the recorded connections and those that are being opened now, and end every wait
    for a collective. Safe to call from any thread, and more than once.
    """
    _aborted.set()
    for descriptor, name in _open_sockets().items():
        if name in _recorded or any(name not in before for before in list(_before)):
            _shut_down(descriptor)
    for future in list(_futures):
        if not future.done():
            with suppress(RuntimeError):  # it has just been completed
                future.set_exception(_error())


def reset() -> None:
    """Forget the recorded sockets: their groups are destroyed, and new ones may be made."""
    _recorded.clear()
    _futures.clear()
    _made.clear()
    _aborted.clear()


def raise_if_aborted() -> None:
    """Raise `PeersLostError` if the groups were aborted."""
    if _aborted.is_set():
        raise _error()


def register(future: Any) -> None:
    """Have `abort` complete a `torch.futures.Future` with an error."""
    _futures.add(future)
    if _aborted.is_set():
        abort()


def unregister(future: Any) -> None:
    """Leave a completed future alone."""
    _futures.discard(future)


def _error() -> PeersLostError:
    return PeersLostError("this rank leaves its worker group, since other ranks are lost")


def _open_sockets() -> dict[int, str]:
    """The names of this process's sockets, by descriptor; empty where the system has no list."""
    found = {}
    # not by paths, which take several times as long: a recovery lists them a dozen times
    for name in os.listdir(_DESCRIPTORS) if is_supported() else ():  # noqa: PTH208
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(f"{_DESCRIPTORS}/{name}")  # noqa: PTH115
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def _shut_down(descriptor: int) -> None:
    """Shut down a TCP connection, or have a socket that listens refuse newcomers; does nothing with
    another socket, or with what has got its descriptor meanwhile.
    """
    with suppress(OSError), open_copy(descriptor) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if _is_listening(own):
            attach_filter(descriptor, own.family, ())
        else:
            own.shutdown(socket.SHUT_RDWR)


def _is_listening(own: socket.socket) -> bool:
    return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
