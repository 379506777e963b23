"""Reads the kubeconfig, or the service account of the pod that this runs in, and makes of it the
address and the identity for the API server, connection pools and websockets. Credentials come from
the kubeconfig itself, a token file, an exec plugin, or the official client.

Every field of a kubeconfig is used or rejected by name: a field that is silently ignored may be the
one that defines the identity.

The official client's `KubeConfigLoader` is used for OpenID providers only. It does not support
impersonation, logs the failure of a plugin and continues without credentials, never runs a plugin
again for a certificate, ignores unknown fields, writes keys to files that outlive a crash, and
takes a third of a second to import. Using it would save about 30 lines that merge files.
"""

from __future__ import annotations

import base64
import ipaddress
import math
import os
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from kdist.errors import Code, KdistError, UsageError
from kdist.threads import OnError, start_thread
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json
from kdist_trainer.network.deadline_http import DeadlineConnection, guard, guard_tls

EARLY_SECONDS = 10.0
"""Seconds before their expiry at which credentials of a plugin are renewed."""
_SHOWN_LINES = 20
_MOST_BYTES = 1 << 20
_LIST = "kubectl config get-contexts"


def unusable(reason: str, hint: str = "") -> KdistError:
    """The error for a kubeconfig that cannot be used."""
    message = f"the kubeconfig cannot be used: {reason}"
    return KdistError(message, hint=hint, next_command=_LIST, code=Code.UNREACHABLE)


class Credential(NamedTuple):
    """An `Authorization` header, a client certificate with its key (PEM text), or both."""

    authorization: str = ""
    certificate: str = ""
    key: str = ""


def bearer(token: str) -> Credential:
    """The credential that sends a token. Raises `ValueError`, without the token, for one that no
    header can hold.
    """
    if not (token.isascii() and token.isprintable()):
        raise ValueError("the token has characters that no header can hold, such as a line end")
    return Credential(f"Bearer {token}" if token else "")


def read_small_file(file: Path) -> str:
    """A token, certificate or key. Raises `OSError`, and `ValueError` for what is none: no regular
    file, larger than a mebibyte, or no text.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would be waited for
    with os.fdopen(os.open(file, flags), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError(f"{file} is no regular file")
        data = opened.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{file} is larger than {_MOST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text") from None


class Fixed(NamedTuple):
    """Credentials from the kubeconfig, or the `Authorization` header that `ask` returns."""

    credential: Credential = Credential()
    ask: Callable[[], str] | None = None

    def get(self) -> Credential:
        """The credentials, with the current `Authorization` header."""
        return self.credential if self.ask is None else Credential(self.ask())

    def forget(self) -> bool:
        """There are no others."""
        return False


@dataclass(frozen=True)
class TokenFile:
    """A token in a file, which is replaced before the token expires, so it is read each time."""

    file: Path

    def get(self) -> Credential:
        """The current token."""
        try:
            return bearer(read_small_file(self.file).strip())
        except (OSError, ValueError) as error:
            raise KdistError(f"the token cannot be read: {error}", code=Code.UNREACHABLE) from error

    def forget(self) -> bool:
        """There are no others: the file was just read."""
        return False


class Plugin:
    """A program that prints credentials (`users[].user.exec`). It runs when they are first needed,
    and again before they expire.
    """

    def __init__(
        self, settings: Mapping[str, Any], *, folder: Path, cluster: Mapping[str, Any]
    ) -> None:
        command = settings.get("command")
        if (
            not isinstance(command, str)
            or not command
            or not isinstance(settings.get("apiVersion"), str)
        ):
            raise ValueError("exec needs `command` and `apiVersion`")
        # As in kubectl: a path is relative to the kubeconfig, a bare name is searched in PATH.
        path = str(folder / command) if os.sep in command else command
        self._argv = [path, *(str(each) for each in settings.get("args") or [])]
        self._version = str(settings["apiVersion"])
        self._hint = str(settings.get("installHint") or "").strip()
        self._env = {str(each["name"]): str(each["value"]) for each in settings.get("env") or []}
        self._mode = settings.get("interactiveMode") or "IfAvailable"
        self._cluster = cluster if settings.get("provideClusterInfo") else None
        self._lock = threading.Lock()
        self._found: Credential | None = None
        self._until = float("inf")

    def get(self) -> Credential:
        """The credentials of the last run while they are valid, else of a new run."""
        with self._lock:
            if self._found is None or time.time() > self._until - EARLY_SECONDS:
                self._found, self._until = self._read(self._run())
            return self._found

    def forget(self) -> bool:
        """The next `get` runs the plugin again."""
        with self._lock:
            self._found = None
        return True

    def _run(self) -> str:
        """Run the plugin; its stdout. In a terminal its stderr is forwarded, because a login may
        prompt.
        """
        import subprocess  # most credentials come from no plugin

        interactive = self._mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
        if self._mode == "Always" and not interactive:
            raise self._fail("it needs a terminal (interactiveMode: Always), and there is none")
        spec = {
            "interactive": interactive,
            **({"cluster": self._cluster} if self._cluster is not None else {}),
        }
        request = {"apiVersion": self._version, "kind": "ExecCredential", "spec": spec}
        env = {**os.environ, **self._env, "KUBERNETES_EXEC_INFO": encode_json(request)}
        stdin = None if interactive else subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                self._argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
            )
        except OSError as error:
            raise self._fail(f"it cannot be started: {error.strerror or error}") from error
        stderr = bytearray()
        listener = start_thread(
            partial(_collect, process.stderr, stderr, interactive),
            name="credential plugin",
            on_error=OnError.REPORT,  # only the plugin's stderr is lost
        )
        with process:
            out = process.stdout.read() if process.stdout else b""
            listener.join()
        if process.returncode:
            raise self._fail(
                f"it ended with code {process.returncode}", stderr.decode(errors="replace")
            )
        return out.decode(errors="replace")

    def _read(self, text: str) -> tuple[Credential, float]:
        """The credentials in the plugin's output, and the unix time at which they expire."""
        try:
            answer = parse_json(text)
            status = answer["status"]
            token = status.get("token") or ""
            certificate = status.get("clientCertificateData") or ""
            key, end = status.get("clientKeyData") or "", status.get("expirationTimestamp")
            until = datetime.fromisoformat(end).timestamp() if end else float("inf")
            authorization = bearer(str(token)).authorization
            if answer.get("apiVersion") != self._version:
                raise ValueError(
                    f"it answers in {answer.get('apiVersion')}, not in {self._version}"
                )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._fail(f"it does not answer with an ExecCredential ({error})") from error
        if not token and not (certificate and key):
            raise self._fail("its answer holds neither a token nor a certificate with its key")
        return Credential(authorization, certificate, key), until

    def _fail(self, why: str, stderr: str = "") -> KdistError:
        lines = stderr.strip().splitlines()[-_SHOWN_LINES:]
        first = f"no credentials: the plugin `{' '.join(self._argv)}` of the kubeconfig: {why}"
        message = "\n  ".join([first, *lines])
        hint = self._hint or "run it by itself, or log in to the cluster again"
        return KdistError(message, hint=hint, code=Code.UNREACHABLE)


def _collect(stream: Any, collected: bytearray, live: bool) -> None:
    """Collect what a program prints; with `live`, forward it to stderr at once."""
    while chunk := os.read(stream.fileno(), 2**16):
        collected.extend(chunk)
        if live:
            os.write(2, chunk)


CredentialSource = Fixed | TokenFile | Plugin
"""Its `get` returns valid credentials, or raises `KdistError` with code UNREACHABLE; `forget` drops
those that the server rejected, and says whether `get` can return others.
"""

CONNECT_SECONDS = 10.0
_SWITCHING_PROTOCOLS = 101
_CHANNELS = "v5.channel.k8s.io,v4.channel.k8s.io"
_MOST_ANSWER_BYTES = 1 << 20  # of a websocket's handshake, which may be an error's text


@dataclass(frozen=True)
class Impersonation:
    """The identity to act as. The server checks the rights of that identity; the caller needs the
    right to impersonate it. Raises `UsageError` for groups, a uid or extras without a user, and for
    a name that no header can hold.
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
        """A pool that keeps up to `connections` connections open, all with one TLS context, and
        each with a deadline for each answer. Raises `OSError` for a key that cannot be used.
        """
        import urllib3
        from urllib3.connection import HTTPConnection, HTTPSConnection

        class Connection(HTTPConnection):
            def _new_conn(self) -> socket.socket:
                return guard(super()._new_conn())

        class TlsConnection(HTTPSConnection):
            def _new_conn(self) -> socket.socket:
                return guard(super()._new_conn())

        class Pool(urllib3.HTTPConnectionPool):
            ConnectionCls = Connection

        class TlsPool(urllib3.HTTPSConnectionPool):
            ConnectionCls = TlsConnection

        settings: dict[str, Any] = {"maxsize": connections}
        if self.server.startswith("https"):
            settings["ssl_context"] = guard_tls(self._tls(credential))
            if self.server_name:
                settings["server_hostname"] = self.server_name
        if self.proxy:
            user = self._proxy_user()
            headers = urllib3.make_headers(proxy_basic_auth=":".join(user)) if user else None
            pool: urllib3.PoolManager = urllib3.ProxyManager(
                self.proxy, proxy_headers=headers, **settings
            )
        else:
            pool = urllib3.PoolManager(**settings)
        pool.pool_classes_by_scheme = {"http": Pool, "https": TlsPool}
        return pool

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
        """A socket to the server, whose deadline and bound also hold for the answer to the
        handshake.
        """
        server, proxy = urlsplit(self.server), urlsplit(self.proxy)
        is_tls = server.scheme == "https"
        if self.proxy and proxy.scheme != "http":
            raise KdistError(
                "exec, port-forward and what needs them cannot go through a proxy that "
                f"is reached over TLS ({proxy.hostname})",
                hint="name its address with http:// in `proxy-url`, if it has one",
                code=Code.UNREACHABLE,
            )
        address = server.hostname or "", server.port or (443 if is_tls else 80)
        first = (proxy.hostname or "", proxy.port or 80) if self.proxy else address
        tls = guard_tls(self._tls(credential)) if is_tls else None
        connection = DeadlineConnection(*first, timeout=CONNECT_SECONDS)
        if self.proxy:
            user = self._proxy_user()
            headers = {"Proxy-Authorization": _basic(*user)} if user else {}
            connection.set_tunnel(*address, headers=headers)
        connection.connect()
        connected: Any = connection.sock
        if tls is not None:
            connected = tls.wrap_socket(connected, server_hostname=self.server_name or address[0])
        connected.allow(_MOST_ANSWER_BYTES)
        return connected

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


_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CERTIFICATES = ("client-certificate", "client-key")
_USER = frozenset(
    {
        *_CERTIFICATES,
        *(f"{name}-data" for name in _CERTIFICATES),
        "token",
        "tokenFile",
        "username",
        "password",
        "exec",
        "auth-provider",
        "as",
        "as-uid",
        "as-groups",
        "as-user-extra",
        "extensions",
    }
)
_CLUSTER = frozenset(
    {
        "server",
        "certificate-authority",
        "certificate-authority-data",
        "insecure-skip-tls-verify",
        "tls-server-name",
        "proxy-url",
        "disable-compression",
        "extensions",
    }
)
_FOLDER = "folder"  # added to each entry: where its relative paths start

Entry = dict[str, Any]


def exists(file: str | None = None) -> bool:
    """Whether there is a kubeconfig or a service account."""
    return bool(_find_files(file)[1]) or _ACCOUNT.joinpath("token").is_file()


def _find_files(file: str | None) -> tuple[str, list[Path]]:
    """The paths of the kubeconfig, and those of its files that exist."""
    paths = file or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    names = [paths] if file else [path for path in paths.split(os.pathsep) if path]
    return paths, [Path(path) for path in names if Path(path).is_file()]


def list_contexts(file: str | None = None) -> list[str]:
    """Names of the kubeconfig's contexts. Raises what reading a damaged file raises."""
    return [str(name) for name in _merge(_find_files(file)[1])["contexts"]]


def load(
    context: str | None = None,
    *,
    file: str | None = None,
    impersonation: Impersonation | None = None,
) -> Access:
    """Read the kubeconfig, or without one the service account of the pod that this runs in. Raises
    `KdistError` if there is neither, the context does not exist, or the kubeconfig cannot be used
    (UNREACHABLE).

    Args:
        context: name of the context; None for the kubeconfig's current one.
        file: path of the kubeconfig; None for `$KUBECONFIG`, else `~/.kube/config`.
        impersonation: its parts take precedence over those in the kubeconfig.
    """
    paths, files = _find_files(file)
    requested = impersonation or Impersonation()
    if not files and not file and context is None and _ACCOUNT.joinpath("token").is_file():
        return _in_cluster(requested)
    if not files:
        raise KdistError(
            f"there is no kubeconfig at {paths}",
            hint="set KUBECONFIG or --kubeconfig to a file that exists, or ask an admin of the "
            "cluster for one; `kdist run` needs none",
            next_command=_LIST,
            code=Code.UNREACHABLE,
        )
    try:
        return _access(_merge(files), context, requested, files)
    except KdistError:
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        it = "it " if isinstance(error, MalformedTextError) else ""
        hint = f"it is read from {paths}; it stays so until you choose another or change it"
        raise unusable(f"{it}{error}", hint) from error


def _in_cluster(impersonation: Impersonation) -> Access:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        return Access(
            context="in-cluster",
            namespace=_ACCOUNT.joinpath("namespace").read_text().strip() or "default",
            server=f"https://[{host}]:{port}"
            if ":" in host
            else f"https://{host or 'kubernetes.default.svc'}:{port}",
            credentials=TokenFile(_ACCOUNT / "token"),
            impersonation=impersonation,
            authority=_ACCOUNT.joinpath("ca.crt").read_text(),
        )
    except OSError as error:
        raise KdistError(
            f"the service account of this pod cannot be used: {error}", code=Code.UNREACHABLE
        ) from error


def _merge(files: Sequence[Path]) -> Entry:
    """Merge the files: the first entry of a name wins, and so does the first current context."""
    # imported where it is needed: it is slow, and a pod has no kubeconfig
    from kdist.yaml_text import parse_yaml

    merged: Entry = {"current-context": "", "contexts": {}, "clusters": {}, "users": {}}
    for file in files:
        documents = parse_yaml(file.read_bytes())
        if len(documents) > 1:
            raise ValueError(f"{file} has {len(documents)} YAML documents, and may have one")
        document = documents[0] if documents else None
        if not isinstance(document, dict):
            raise TypeError(f"{file} is {'empty' if document is None else 'not a mapping'}")
        merged["current-context"] = (
            merged["current-context"] or document.get("current-context") or ""
        )
        for kind, part in (("contexts", "context"), ("clusters", "cluster"), ("users", "user")):
            for each in document.get(kind) or []:
                merged[kind].setdefault(
                    each["name"], {**(each.get(part) or {}), _FOLDER: file.absolute().parent}
                )
    return merged


def _access(
    merged: Entry, context: str | None, requested: Impersonation, files: Sequence[Path]
) -> Access:
    name = context or merged["current-context"]
    if not name:
        raise ValueError("it names no current-context; choose one with --context")
    chosen = _find(merged, "contexts", name)
    cluster = _find(merged, "clusters", chosen.get("cluster"))
    user = _find(merged, "users", chosen["user"]) if chosen.get("user") else {_FOLDER: Path()}
    _reject_unknown(f"user {chosen.get('user')}", set(user) - _USER - {_FOLDER})
    _reject_unknown(f"cluster {chosen.get('cluster')}", set(cluster) - _CLUSTER - {_FOLDER})
    server = _text(cluster, "server").rstrip("/")
    if urlsplit(server).scheme not in ("http", "https"):
        raise ValueError(
            f"cluster {chosen.get('cluster')}: its server is `{server}`, which is not "
            "an https:// address"
        )
    authority = _pem(cluster, "certificate-authority")
    return Access(
        context=str(name),
        namespace=_text(chosen, "namespace") or "default",
        server=server,
        credentials=_credentials(
            user, cluster_info(server, cluster, authority), files=files, context=str(name)
        ),
        impersonation=_impersonate(user, requested),
        authority=authority,
        verify=not cluster.get("insecure-skip-tls-verify"),
        server_name=_text(cluster, "tls-server-name"),
        proxy=_find_proxy(server, _text(cluster, "proxy-url")),
    )


def _reject_unknown(where: str, fields: set[str]) -> None:
    if fields:
        named = ", ".join(f"`{each}`" for each in sorted(fields))
        raise unusable(
            f"{where} has {named}, which kdist does not support",
            "remove it, or give a kubeconfig without it with --kubeconfig",
        )


def _find(merged: Entry, kind: str, name: object) -> Entry:
    if name not in merged[kind]:
        raise LookupError(
            f"it has no {kind[:-1]} `{name}`; it has {', '.join(map(str, merged[kind])) or 'none'}"
        )
    found: Entry = merged[kind][name]
    return found


def _credentials(
    user: Entry, cluster: Mapping[str, Any], *, files: Sequence[Path], context: str
) -> CredentialSource:
    if user.get("auth-provider"):
        return _provider(user["auth-provider"], files, context)
    if user.get("exec"):
        return Plugin(user["exec"], folder=user[_FOLDER], cluster=cluster)
    if user.get("tokenFile"):  # as for kubectl, it comes before `token`
        return TokenFile(user[_FOLDER] / _text(user, "tokenFile"))
    authorization = bearer(_text(user, "token")).authorization
    if user.get("username") and not authorization:
        authorization = _basic(_text(user, "username"), _text(user, "password"))
    return Fixed(Credential(authorization, *(_pem(user, name) for name in _CERTIFICATES)))


def _provider(provider: Mapping[str, Any], files: Sequence[Path], context: str) -> CredentialSource:
    """The token of an OpenID provider, which the official client renews."""
    if provider.get("name") != "oidc":
        raise unusable(
            f"auth-provider `{provider.get('name')}` is no longer supported by Kubernetes' clients",
            "use the plugin that replaces it: gke-gcloud-auth-plugin, kubelogin, …",
        )
    from kubernetes.client.configuration import Configuration
    from kubernetes.config import kube_config

    merged = kube_config.KubeConfigMerger(os.pathsep.join(map(str, files)))
    loader = kube_config.KubeConfigLoader(
        merged.config,
        active_context=context,
        config_base_path=None,
        config_persister=merged.save_changes,
    )
    configuration = Configuration()
    loader.load_and_set(configuration)

    def ask() -> str:
        values = (each["value"] for each in configuration.auth_settings().values())
        return next((str(value) for value in values if value), "")

    if not ask():
        raise KdistError(
            f"no credentials for context {context}: its oidc token cannot be used",
            code=Code.UNREACHABLE,
        )
    return Fixed(ask=ask)


def _impersonate(user: Entry, requested: Impersonation) -> Impersonation:
    return Impersonation(
        requested.user or _text(user, "as"),
        requested.groups or tuple(str(each) for each in user.get("as-groups") or []),
        requested.uid or _text(user, "as-uid"),
        {
            str(key): tuple(map(str, values))
            for key, values in (user.get("as-user-extra") or {}).items()
        },
    )


def _find_proxy(server: str, configured: str) -> str:
    """The kubeconfig's proxy, else the environment's, which does not apply to loopback addresses
    and to the hosts in NO_PROXY.
    """
    parts = urlsplit(server)
    direct = _is_direct(parts.hostname or "", server)
    proxy = configured
    if not proxy and not direct:
        from urllib.request import getproxies  # imports an HTTP client of its own

        proxy = getproxies().get(parts.scheme, "")
    if proxy and urlsplit(proxy).scheme not in ("http", "https"):
        raise KdistError(
            f"the proxy {proxy} "
            f"{'of the kubeconfig (`proxy-url`)' if configured else 'of the environment'} "
            "cannot be used: "
            "kdist supports http:// and https:// proxies only",
            hint=(
                "give the address of an HTTP proxy, or reach the cluster through a tunnel and "
                "remove the proxy"
            ),
            code=Code.UNREACHABLE,
        )
    return proxy


def _is_direct(host: str, server: str) -> bool:
    if host == "localhost":
        return True
    try:
        if ipaddress.ip_address(host).is_loopback:
            return True
    except ValueError:
        pass
    if not any(name.lower() == "no_proxy" for name in os.environ):
        return False
    from requests.utils import should_bypass_proxies

    return bool(should_bypass_proxies(server, no_proxy=None))


def _text(part: Mapping[str, Any], name: str) -> str:
    value = part.get(name) or ""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` is not text")  # and may be a secret
    return value


def _pem(part: Mapping[str, Any], name: str) -> str:
    """The text of a certificate or a key, from the kubeconfig or from a file that it names."""
    if part.get(f"{name}-data"):
        return base64.b64decode(_text(part, f"{name}-data"), validate=True).decode()
    return read_small_file(part[_FOLDER] / _text(part, name)) if part.get(name) else ""
