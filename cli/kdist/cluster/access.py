"""The address and the identity for the API server, and the connection pools and websockets that
are created from them.
"""

from __future__ import annotations

import base64
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from kdist.cluster.credentials import Credential, CredentialSource, Fixed
from kdist.errors import Code, KdistError, UsageError

CONNECT_SECONDS = 10.0
_SWITCHING_PROTOCOLS = 101
_CHANNELS = "v5.channel.k8s.io,v4.channel.k8s.io"


@dataclass(frozen=True)
class Impersonation:
    """The identity to act as. The server checks the rights of that identity; the caller needs the
    right to impersonate it.

    Raises:
        UsageError: groups, a uid or extras without a user, or a name that no header can hold.
    """

    user: str = ""
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.groups or self.uid or self.extra) and not self.user:
            raise UsageError(
                "groups, a uid or extras can only be impersonated together with a user",
                hint="add --as USER",
            )
        values = [
            self.user,
            *self.groups,
            self.uid,
            *(each for found in self.extra.values() for each in found),
        ]
        if bad := next((each for each in values if not each.isprintable()), None):
            raise UsageError(f"{bad!r} is no valid name of a user or group")

    def headers(self) -> list[tuple[str, str]]:
        """The impersonation headers as client-go writes them, one for each group."""
        found = [("impersonate-user", self.user), ("impersonate-uid", self.uid)]
        found += [("impersonate-group", each) for each in self.groups]
        for key, values in self.extra.items():
            found += [(f"impersonate-extra-{quote(key.lower(), safe='')}", each) for each in values]
        return [(name, value) for name, value in found if value]


@dataclass(frozen=True)
class Access:
    """How to reach an API server, and as whom.

    Attributes:
        context: name of the context in the kubeconfig.
        namespace: default namespace.
        server: URL of the API server.
        credentials: source of the credentials.
        impersonation: identity to act as.
        authority: CA certificates as PEM text; empty for those of the system.
        verify: whether the server's certificate is verified.
        server_name: name that the server's certificate must be for, if not that of `server`.
        proxy: URL of the proxy; empty for a direct connection.
    """

    context: str
    namespace: str
    server: str
    credentials: CredentialSource = field(default_factory=Fixed)
    impersonation: Impersonation = field(default_factory=Impersonation)
    authority: str = ""
    verify: bool = True
    server_name: str = ""
    proxy: str = ""

    def headers(self, credential: Credential) -> list[tuple[str, str]]:
        """The headers for authentication and impersonation."""
        own = [("authorization", credential.authorization)] if credential.authorization else []
        return [("user-agent", "kdist"), *own, *self.impersonation.headers()]

    def pool(self, connections: int, credential: Credential) -> Any:
        """A pool that keeps up to `connections` connections open, all with one TLS context. Raises
        `OSError` for a key that cannot be used.
        """
        from kdist.cluster import connections as made

        settings: dict[str, Any] = {"maxsize": connections}
        tls = self._tls(credential) if self.server.startswith("https") else None
        if tls is not None and self.server_name:
            settings["server_hostname"] = self.server_name
        return made.make_pool(proxy=self.proxy, proxy_user=self._proxy_user(), tls=tls, **settings)

    def websocket(self, path: str) -> Any:
        """Open a websocket to this path, with the channel protocol of exec. Raises the errors of
        `websocket-client`.
        """
        from websocket import WebSocket, WebSocketBadStatusException

        credential = self.credentials.get()
        websocket: Any = WebSocket(skip_utf8_validation=False)
        headers = [*self.headers(credential), ("sec-websocket-protocol", _CHANNELS)]
        websocket.connect(
            f"{self.server.replace('http', 'ws', 1)}{path}",
            header=[f"{name}: {value}" for name, value in headers],
            socket=self._socket(credential),
            redirect_limit=0,
        )
        if websocket.status != _SWITCHING_PROTOCOLS:
            websocket.close()
            raise WebSocketBadStatusException("it redirects", websocket.status)
        websocket.settimeout(None)
        websocket.sock.allow(math.inf)
        return websocket

    def _socket(self, credential: Credential) -> Any:
        """A socket to the server, whose deadline also holds for the answer to the handshake."""
        from kdist.cluster import connections as made

        server, proxy = urlsplit(self.server), urlsplit(self.proxy)
        is_tls = server.scheme == "https"
        if self.proxy and proxy.scheme != "http":
            raise KdistError(
                (
                    "exec, port-forward and what needs them cannot go through a proxy that "
                    f"is reached over TLS ({proxy.hostname})"
                ),
                hint="name its address with http:// in `proxy-url`, if it has one",
                code=Code.UNREACHABLE,
            )
        user = self._proxy_user()
        return made.open_socket(
            (server.hostname or "", server.port or (443 if is_tls else 80)),
            seconds=CONNECT_SECONDS,
            tls=self._tls(credential) if is_tls else None,
            server_name=self.server_name,
            proxy=(proxy.hostname or "", proxy.port or 80) if self.proxy else None,
            proxy_headers={"Proxy-Authorization": _basic(*user)} if user else {},
        )

    def _proxy_user(self) -> tuple[str, str] | None:
        proxy = urlsplit(self.proxy)
        return (unquote(proxy.username), unquote(proxy.password or "")) if proxy.username else None

    def _tls(self, credential: Credential) -> Any:
        import ssl

        from urllib3.util import ssl_

        context = ssl_.create_urllib3_context()
        if not self.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif self.authority:
            context.load_verify_locations(cadata=self.authority)
        else:
            context.load_default_certs()
        if credential.certificate:
            # OpenSSL reads a key from a file only
            with tempfile.NamedTemporaryFile(mode="w", suffix=".pem") as file:
                file.write(f"{credential.certificate}\n{credential.key}")
                file.flush()
                context.load_cert_chain(file.name)
        return context


def _basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def cluster_info(server: str, cluster: Mapping[str, Any], authority: str) -> dict[str, Any]:
    """The description of the cluster for a credential plugin (`provideClusterInfo`)."""
    found: dict[str, Any] = {"server": server}
    for name in ("tls-server-name", "insecure-skip-tls-verify", "proxy-url"):
        if cluster.get(name):
            found[name] = cluster[name]
    if authority:
        found["certificate-authority-data"] = base64.b64encode(authority.encode()).decode()
    for each in cluster.get("extensions") or []:
        if each.get("name") == "client.authentication.k8s.io/exec":
            found["config"] = each.get("extension")
    return found
