"""Has a listening socket drop newcomers, all or those from other machines than known ones, while
its open connections continue.

Closing the socket would free its port for others, and libraries that poll it spin once it was shut
down. Linux only. Free of torch.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_ATTACH_FILTER = 26
"""Linux's SO_ATTACH_FILTER, which Python does not name."""
_MAX_INSTRUCTIONS = 4096
# classic BPF: load a word, compare it with a constant, and how much of a packet is kept
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_KEEP, _DROP = 0xFFFFFFFF, 0
_NETWORK_HEADER = 0xFFF00000
_SOURCE = {socket.AF_INET: 12, socket.AF_INET6: 8}
"""Where a packet's network header has the address of its sender."""
_Instruction = tuple[int, int, int, int]


def attach_filter(descriptor: int, family: int, admitted: Collection[str]) -> bool:
    """Have a listening socket drop what does not come from one of the `admitted` addresses; returns
    whether the system does.
    """
    if sys.platform != "linux" or any(each.startswith("::ffff:") for each in admitted):
        return False  # the headers of IPv4 packets at an IPv6 socket would need another program
    program = [*_admit(family, admitted), (_RETURN, 0, 0, _DROP)]
    if len(program) > _MAX_INSTRUCTIONS:
        return False
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    option = struct.pack("HP", len(program), ctypes.addressof(code))
    try:
        with closing(open_copy(descriptor)) as copy:
            copy.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, option)
    except OSError:  # a sandbox without filters
        return False
    return True


def _admit(family: int, addresses: Collection[str]) -> Iterator[_Instruction]:
    for address in sorted(set(addresses)):
        packed = socket.inet_pton(family, address)
        words = struct.unpack(f"!{len(packed) // 4}I", packed)
        for number, word in enumerate(words):
            yield _LOAD, 0, 0, _NETWORK_HEADER + _SOURCE[socket.AddressFamily(family)] + 4 * number
            # one that differs leads past the rest of this address
            yield _EQUAL, 0, 2 * (len(words) - number) - 1, word
        yield _RETURN, 0, 0, _KEEP


def peers_of(port: int, family: int) -> set[str]:
    """The addresses that this process's connections at its own port `port` come from."""
    found = set[str]()
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        with suppress(OSError), closing(open_copy(int(entry.name))) as one:
            if one.family == family and one.getsockname()[1] == port:
                found.add(str(one.getpeername()[0]).partition("%")[0])
    return found


def open_copy(descriptor: int) -> socket.socket:
    """Another descriptor of a socket. Raises `OSError` if it is none."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        raise
