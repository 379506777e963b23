"""Connections to the API server that have a deadline for each answer: those of a pool of urllib3,
and the socket of a websocket.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from typing import Any, Final, cast

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from kdist_trainer.network.deadline_http import (
    DeadlineConnection,
    PlainSocket,
    TlsSocket,
    guard,
    guard_tls,
)

MOST_ANSWER_BYTES: Final = 1 << 20
"""Of the answer to the handshake of a websocket, which may be an error's text."""


class _Connection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        return guard(super()._new_conn())


class _TlsConnection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return guard(super()._new_conn())


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def make_pool(
    *, proxy: str, proxy_user: tuple[str, str] | None, tls: ssl.SSLContext | None, **settings: Any
) -> urllib3.PoolManager:
    """A pool, through a proxy unless `proxy` is empty.

    Args:
        proxy: its URL.
        proxy_user: user and password at the proxy.
        tls: for https.
        settings: more settings of urllib3's pool.
    """
    if tls is not None:
        settings["ssl_context"] = guard_tls(tls)
    if proxy:
        headers = (
            urllib3.make_headers(proxy_basic_auth=":".join(proxy_user)) if proxy_user else None
        )
        pool: urllib3.PoolManager = urllib3.ProxyManager(proxy, proxy_headers=headers, **settings)
    else:
        pool = urllib3.PoolManager(**settings)
    pool.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return pool


def open_socket(
    address: tuple[str, int],
    *,
    seconds: float,
    tls: ssl.SSLContext | None,
    server_name: str,
    proxy: tuple[str, int] | None,
    proxy_headers: Mapping[str, str],
) -> PlainSocket | TlsSocket:
    """A connected socket, which has `seconds` for this and for the answer to the first request,
    and accepts no more of it than `MOST_ANSWER_BYTES`.

    Args:
        address: host and port of the server.
        seconds: until everything fails that was not done.
        tls: the context for https; None for http.
        server_name: name that the server's certificate must be for.
        proxy: host and port of the proxy that connects to it; None for none.
        proxy_headers: sent to the proxy.

    Raises:
        OSError: it cannot be connected in time.
    """
    connection = DeadlineConnection(*(proxy or address), timeout=seconds)
    if proxy:
        connection.set_tunnel(*address, headers=dict(proxy_headers))
    connection.connect()
    made: Any = connection.sock
    if tls is not None:
        made = guard_tls(tls).wrap_socket(made, server_hostname=server_name or address[0])
    made.allow(MOST_ANSWER_BYTES)
    return cast("PlainSocket | TlsSocket", made)
