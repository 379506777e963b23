"""Reads the kubeconfig, or the service account of the pod that this runs in.

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
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kdist.cluster.access import Access, Impersonation, cluster_info
from kdist.cluster.credentials import (
    Credential,
    CredentialSource,
    Fixed,
    Plugin,
    TokenFile,
    bearer,
    read_small_file,
)
from kdist.errors import Code, KdistError
from kdist_trainer.untrusted_text import MalformedTextError

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


def is_there(file: str | None = None) -> bool:
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
    """Read the kubeconfig, or without one the service account of the pod that this runs in.

    Args:
        context: name of the context; None for the kubeconfig's current one.
        file: path of the kubeconfig; None for `$KUBECONFIG`, else `~/.kube/config`.
        impersonation: its parts take precedence over those in the kubeconfig.

    Raises:
        KdistError: there is no kubeconfig and no service account, the context does not exist, or
            the kubeconfig cannot be used (UNREACHABLE).
    """
    paths, files = _find_files(file)
    requested = impersonation or Impersonation()
    if not files and not file and context is None and _ACCOUNT.joinpath("token").is_file():
        return _in_cluster(requested)
    if not files:
        raise KdistError(
            f"there is no kubeconfig at {paths}",
            hint="set KUBECONFIG, or ask an admin of the cluster for one; `kdist run` needs none",
            code=Code.UNREACHABLE,
        )
    try:
        return _access(_merge(files), context, requested, files)
    except KdistError:
        raise
    except MalformedTextError as error:
        raise KdistError(
            f"the kubeconfig cannot be used: it {error}",
            hint=f"it is read from {paths}",
            code=Code.UNREACHABLE,
        ) from error
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise KdistError(
            f"the kubeconfig cannot be used: {error}",
            hint=f"it is read from {paths}",
            code=Code.UNREACHABLE,
        ) from error


def _in_cluster(impersonation: Impersonation) -> Access:
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST", ""),
        os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
    )
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
        raise KdistError(
            f"the kubeconfig cannot be used: {where} has "
            f"{', '.join(f'`{each}`' for each in sorted(fields))}, "
            "which kdist does not support",
            hint="remove it, or give a kubeconfig without it with --kubeconfig",
            code=Code.UNREACHABLE,
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
        both = f"{_text(user, 'username')}:{_text(user, 'password')}"
        authorization = f"Basic {base64.b64encode(both.encode()).decode()}"
    return Fixed(Credential(authorization, *(_pem(user, name) for name in _CERTIFICATES)))


def _provider(provider: Mapping[str, Any], files: Sequence[Path], context: str) -> CredentialSource:
    """The token of an OpenID provider, which the official client renews."""
    if provider.get("name") != "oidc":
        raise KdistError(
            (
                f"the kubeconfig cannot be used: auth-provider `{provider.get('name')}` is "
                "no longer supported by Kubernetes' clients"
            ),
            hint="use the plugin that replaces it: gke-gcloud-auth-plugin, kubelogin, …",
            code=Code.UNREACHABLE,
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
        return next(
            (
                str(each["value"])
                for each in configuration.auth_settings().values()
                if each["value"]
            ),
            "",
        )

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
    proxy = configured or ("" if direct else _environment_proxy(parts.scheme))
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


def _environment_proxy(scheme: str) -> str:
    from urllib.request import getproxies  # imports an HTTP client of its own

    return getproxies().get(scheme, "")


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
