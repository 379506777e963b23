"""A kubeconfig that holds a certificate or a token, read without the official client, whose import takes longer than a request.

Everything else that a kubeconfig may hold (plugins, providers, passwords, proxies, several files) is the official client's.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_USER = frozenset({"token", "client-certificate", "client-certificate-data", "client-key", "client-key-data"})
_CLUSTER = frozenset(
    {"server", "certificate-authority", "certificate-authority-data", "insecure-skip-tls-verify", "tls-server-name", "extensions"}
)


@dataclass(frozen=True)
class Plain:
    """One context of a kubeconfig. PEM texts are empty where there are none."""

    context: str
    namespace: str
    server: str
    token: str = ""
    authority: str = ""
    certificate: str = ""
    key: str = ""
    verify: bool = True
    server_name: str = ""

    def headers(self) -> dict[str, str]:
        """Who we are, where a token says it."""
        return {"authorization": f"Bearer {self.token}"} if self.token else {}

    def pool(self, connections: int) -> Any:
        """A pool that keeps so many connections, all with one TLS context. Raises `OSError` for a key that cannot be used."""
        import urllib3

        settings: dict[str, Any] = {"maxsize": connections}
        if self.server.startswith("https"):
            settings["ssl_context"] = self._context()
            if self.server_name:
                settings["server_hostname"] = self.server_name
        return urllib3.PoolManager(**settings)

    def _context(self) -> Any:
        import ssl

        from urllib3.util import ssl_

        context = ssl_.create_urllib3_context()
        if not self.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif self.authority:
            context.load_verify_locations(cadata=self.authority)
        else:
            context.load_default_certs()
        if self.certificate:
            with tempfile.NamedTemporaryFile(mode="w", suffix=".pem") as file:  # OpenSSL reads a key from a file only
                file.write(f"{self.certificate}\n{self.key}")
                file.flush()
                context.load_cert_chain(file.name)
        return context


def read(file: Path, context: str | None) -> Plain | None:
    """The context (None: the current one) of a kubeconfig; None where there is more in it than this can read, or a mistake."""
    import yaml

    if any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    try:
        document = yaml.load(file.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
        name = context or document["current-context"]
        chosen = _find(document, "contexts", name)["context"]
        cluster = _find(document, "clusters", chosen["cluster"])["cluster"]
        user = _find(document, "users", chosen["user"])["user"] or {}
        if set(user) - _USER or set(cluster) - _CLUSTER:
            return None
        return Plain(
            context=_text(name),
            namespace=_text(chosen.get("namespace") or "default"),
            server=_text(cluster["server"]).rstrip("/"),
            token=_text(user.get("token") or ""),
            authority=_pem(cluster, "certificate-authority", file.parent),
            certificate=_pem(user, "client-certificate", file.parent),
            key=_pem(user, "client-key", file.parent),
            verify=not cluster.get("insecure-skip-tls-verify"),
            server_name=_text(cluster.get("tls-server-name") or ""),
        )
    except (yaml.YAMLError, OSError, LookupError, TypeError, ValueError, AttributeError):
        return None  # the official client says what is wrong with it


def _find(document: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(each for each in [*document[kind], {}] if not each or each["name"] == name)
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _pem(part: Mapping[str, Any], name: str, folder: Path) -> str:
    """The text of a certificate or a key, which is in the kubeconfig or in a file beside it."""
    if data := part.get(f"{name}-data"):
        return base64.b64decode(_text(data), validate=True).decode()
    return (folder / _text(part[name])).read_text() if part.get(name) else ""
