"""A process listens at the addresses that are needed, at one port, and nowhere else."""

from __future__ import annotations

import errno
import socket

import pytest

from kdist_trainer.network.server import LOOPBACK, listen, own_addresses, with_loopback


def test_the_addresses_of_a_dual_stack_pod_are_served_with_loopback() -> None:
    pod = own_addresses("10.0.0.7,fd00::7")
    assert pod == ("10.0.0.7", "fd00::7")
    assert with_loopback(pod) == ("10.0.0.7", "fd00::7", *LOOPBACK)


def test_without_an_address_it_is_what_the_name_of_this_host_means() -> None:
    known = {info[4][0] for info in socket.getaddrinfo(socket.getfqdn(), None)}
    assert set(own_addresses(None)) == known
    assert own_addresses("localhost")[0] in LOOPBACK


def test_all_addresses_have_the_same_port_and_no_other_is_open() -> None:
    opened = listen(["127.0.0.2", "127.0.0.3"], 0)
    try:
        (port,) = {each.getsockname()[1] for each in opened}
        assert {each.getsockname()[0] for each in opened} == {"127.0.0.2", "127.0.0.3"}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.4", port))  # where no other test listens
    finally:
        for each in opened:
            each.close()


def test_an_address_of_another_host_is_an_error_and_a_missing_loopback_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        listen(["203.0.113.1", *LOOPBACK], 0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen(["127.0.0.1"], taken.getsockname()[1])
    create = socket.create_server

    def without_v6(address: tuple[str, int], **options: object) -> socket.socket:
        if address[0] == "::1":
            raise OSError(errno.EADDRNOTAVAIL, "no IPv6")
        return create(address, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_server", without_v6)
    (only,) = listen(LOOPBACK, 0)
    only.close()
