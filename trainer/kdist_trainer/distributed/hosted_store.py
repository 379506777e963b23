"""The TCPStores of torch's that this process hosts: each listens at one address, refuses newcomers
once its members are connected, and stops listening with the group that it serves.

torch's store authenticates nobody and bounds nothing, so whoever reaches it can read and set keys,
and use up the descriptors and the memory of its process. It runs until the last object that holds
it is gone, and a broken group is held for minutes.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from kdist_trainer import log
from kdist_trainer.network.socket_filter import attach_filter, peers_of
from kdist_trainer.torch_internals import TCPStore

_BACKLOG = 4096


class HostedStore:
    """A TCPStore and the socket at which it listens."""

    def __init__(self, host: str, port: int, *, size: int, timeout: timedelta) -> None:
        """Host a store and wait for its first clients, as many ranks as `size`. It listens only at
        `host`, the name or the address by which other ranks reach it.

        Raises:
            DistNetworkError: If it cannot listen there.
            DistError: If the ranks do not connect in time.
        """
        listener = listen(host, port)
        self._family, self._port = listener.family, port
        self._descriptor = listener.detach()
        self.store = TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=timeout,
            # torch would take the server of an earlier store with this port, if anything still
            # holds it: it listens no more, and the new store would wait for it for ever.
            multi_tenant=False,
            master_listen_fd=self._descriptor,
        )

    def refuse_newcomers(self, *, admit_members: bool) -> None:
        """Drop what arrives from now on to open a connection, or, with `admit_members`, what comes
        from machines that no connected rank is on. Open connections are left alone. Does nothing
        where the system has no socket filters.
        """
        members = peers_of(self._port, self._family) if admit_members else ()
        attach_filter(self._descriptor, self._family, members)

    def close(self) -> None:
        """Stop listening. Connections that are open go on for as long as something holds the store,
        which keeps the descriptor: only the socket behind it is replaced, by one that does nothing.
        """
        if self._descriptor >= 0:
            with socket.socket(socket.AF_UNIX) as nothing:
                os.dup2(nothing.fileno(), self._descriptor, inheritable=False)
            self._descriptor = -1
        # from here on the store may end and close the descriptor, and its number be used again
        vars(self).pop("store", None)


def listen(host: str, port: int) -> socket.socket:
    """Listen at the addresses of this machine that `host` means: loopback if it is that, the pod's
    own address in a pod.

    A name that this machine does not have, or has on loopback only though others shall reach it by
    that name, says nothing about addresses: then all are listened at, with a warning. Raises
    `DistNetworkError` if another process listens there, or no address can be bound.
    """
    reason = f"{host} is no address of this machine"
    means_loopback = _means_loopback(host)
    for family, address in _addresses(host):
        if not means_loopback and ip_address(address.partition("%")[0]).is_loopback:
            reason = f"{host} is a loopback address on this machine"
            continue
        if (server := _bind(family, address, port)) is not None:
            return server
    log.warn(
        "store-unbound",
        message=f"a store of torch listens at all addresses, since {reason}: give --address",
    )
    server = _bind(socket.AF_INET6, "::", port) or _bind(socket.AF_INET, "0.0.0.0", port)  # noqa: S104
    if server is None:
        raise dist.DistNetworkError(f"a store cannot listen at port {port}: {reason}")
    return server


def _bind(family: int, address: str, port: int) -> socket.socket | None:
    """A socket that listens there; None if the address is none of this machine's."""
    if address == "::" and not socket.has_dualstack_ipv6():
        return None
    try:
        return socket.create_server(
            (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=address == "::"
        )
    except OSError as error:
        number = error.errno or 0
        if number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return None
        name = errno.errorcode.get(number, str(number))
        raise dist.DistNetworkError(
            f"a store cannot listen at {address} port {port}: {name}: {error}"
        ) from error


def _addresses(host: str) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(int(family), str(address[0])) for family, _, _, _, address in found]


def _means_loopback(host: str) -> bool:
    """Whether `host` is an address, or the name of the loopback: no name that other machines may
    know by another address.
    """
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return host.partition(".")[0] in ("localhost", "ip6-localhost")
    return True


def open_script_store(*positional: Any, **options: Any) -> TCPStore:
    """What stands in for `TCPStore` where a script's `init_process_group` makes one: rank 0's
    listens only at the address that it is given, and once all ranks are connected admits their
    machines only. A script may connect to it once more, so newcomers from there are not refused.
    """
    host, port = options.get("host_name"), options.get("port")
    is_host = options.get("is_master") and options.get("use_libuv", True)
    if not is_host or not host or not port:
        return TCPStore(*positional, **options)
    try:
        listener = listen(str(host), int(port))
    except dist.DistNetworkError:  # a store of this process has the port, which torch shares, or
        return TCPStore(*positional, **options)  # another process, which torch reports
    family, descriptor = listener.family, listener.detach()
    options["master_listen_fd"] = descriptor
    store = TCPStore(*positional, **options)
    if options.get("world_size"):
        attach_filter(descriptor, family, peers_of(int(port), family))
    return store
