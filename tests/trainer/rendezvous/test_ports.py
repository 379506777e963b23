"""The port for a group's first rank: free, and none that the kernel gives to a passing
connection.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kdist_trainer.rendezvous import handler
from kdist_trainer.rendezvous.handler import pick_port


@pytest.mark.skipif(
    not Path("/proc/sys/net").exists(), reason="only Linux says which ports it gives away"
)
def test_it_lies_below_the_ports_that_the_kernel_gives_away() -> None:
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    picked = {pick_port() for _ in range(20)}
    assert len(picked) > 10, "two groups of a host hardly pick the same"
    assert given <= 11_000 or max(picked) < given


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for family, host in (
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, ""),
        (socket.AF_INET6, "::1"),
    ):
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.bind((host, 0))
            server.listen()
            port = server.getsockname()[1]
            assert not handler._is_free(port)
        assert handler._is_free(port)
    monkeypatch.setattr(handler, "_FIRST", handler._LAST)
    assert pick_port() > 0, "with too few to choose from it is one that the kernel gives"
