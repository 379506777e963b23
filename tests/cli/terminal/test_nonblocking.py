"""An outlet never makes its writer wait, and what it hands on is whole lines in their order."""

from __future__ import annotations

import os
import pty
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kdist.terminal.nonblocking import LIMIT, NonBlockingWriter

LINE = "x" * 99
MANY = 20 * LIMIT // 100


def make_pipe() -> tuple[int, int]:
    return os.pipe()


def make_sockets() -> tuple[int, int]:
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


def make_terminal() -> tuple[int, int]:
    return pty.openpty()


def read_all(descriptor: int) -> bytes:
    """What comes until the other end is closed."""
    read = bytearray()
    try:
        while piece := os.read(descriptor, 1 << 16):
            read += piece
    except OSError:  # how a terminal says it
        pass
    return bytes(read)


@pytest.mark.parametrize("make", [make_pipe, make_sockets, make_terminal])
@pytest.mark.sampled
def test_a_reader_that_does_not_read_gets_whole_lines_once_it_does_and_hears_what_is_missing(
    make: Callable[[], tuple[int, int]],
) -> None:
    reader, writer = make()
    outlet = NonBlockingWriter(writer)
    for number in range(MANY):
        assert outlet.write(f"{number} {LINE}\n"), "nobody reads, and yet it returns"
    assert outlet.is_behind
    read: list[bytes] = []
    reading = threading.Thread(target=lambda: read.append(read_all(reader)))
    reading.start()
    outlet.drain()
    outlet.write("last\n")
    outlet.drain()
    outlet.close()
    os.close(writer)
    reading.join()
    os.close(reader)
    lines = read[0].decode().replace("\r\n", "\n").splitlines()
    kept = len(lines) - (1 if make is make_terminal else 2)
    assert lines[:kept] == [f"{number} {LINE}" for number in range(kept)]
    assert kept * 100 > LIMIT
    if make is not make_terminal:
        assert lines[kept] == f"… {MANY - kept} lines are left out: they were not read in time"
    assert lines[-1] == "last"


def test_a_descriptor_that_others_share_goes_on_waiting_for_them() -> None:
    reader, writer = os.pipe()
    outlet = NonBlockingWriter(writer)
    outlet.write("one\n")
    assert os.get_blocking(writer)
    outlet.close()
    os.close(writer)
    assert read_all(reader) == b"one\n"
    os.close(reader)


def test_a_reader_that_has_gone_is_nothing_to_fail_of() -> None:
    reader, writer = os.pipe()
    outlet = NonBlockingWriter(writer)
    os.close(reader)
    outlet.write("one\n")
    outlet.drain()
    assert not outlet.is_behind
    outlet.close()
    os.close(writer)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only Linux has a disk that is always full"
)
def test_a_full_disk_loses_what_was_said_and_nothing_else() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    outlet = NonBlockingWriter(full)
    outlet.write("one\n")
    assert not outlet.is_behind
    outlet.close()
    os.close(full)


def test_a_file_is_written_where_its_owner_is(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        log.write(b"before\n")
        log.flush()
        outlet = NonBlockingWriter(log.fileno())
        outlet.write("one\n")
        outlet.close()
    assert (tmp_path / "log").read_text() == "before\none\n"
