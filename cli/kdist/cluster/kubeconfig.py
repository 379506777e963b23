"""Whom to talk to, and as whom: the kubeconfig, or the account of the pod that this runs in.

What a kubeconfig holds is honoured or refused by its name: a field that is passed over in silence
may be the one that says who we are to be.

The official client's `KubeConfigLoader` is used for OpenID providers only. As a base class it would
save the merging of files, some thirty lines: it knows no impersonation, logs the failure of a
plugin and goes on without credentials, asks no plugin again for a certificate, ignores fields that
it does not know, writes keys to files that outlive a crash, and takes a third of a second to
import.
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
from kdist.cluster.credentials import Credential, CredentialSource, Fixed, Plugin, TokenFile
from kdist.errors import Code, KdistError

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
_FOLDER = "folder"  # where an entry's relative paths start, beside what the file says of it

Entry = dict[str, Any]


def is_there(file: str | None = None) -> bool:
    """Whether anything says which cluster is meant."""
    return bool(_look(file)[1]) or _ACCOUNT.joinpath("token").is_file()


def _look(file: str | None) -> tuple[str, list[Path]]:
    """Where a kubeconfig is looked for, and the files of it that are there."""
    paths = file or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    names = [paths] if file else [path for path in paths.split(os.pathsep) if path]
    return paths, [Path(path) for path in names if Path(path).is_file()]


def load(
    context: str | None = None,
    *,
    file: str | None = None,
    impersonation: Impersonation | None = None,
) -> Access:
    """Read the kubeconfig (`file`, else `$KUBECONFIG`, else `~/.kube/config`); without one, the
    account of the pod that this runs in. Each part of `impersonation` overrules what the kubeconfig
    says.

    Raises `KdistError` (code UNREACHABLE) if there is neither, if the context does not exist, or if
    it cannot be used.
    """
    paths, files = _look(file)
    asked = impersonation or Impersonation()
    if not files and not file and context is None and _ACCOUNT.joinpath("token").is_file():
        return _in_cluster(asked)
    if not files:
        raise KdistError(
            f"there is no kubeconfig at {paths}",
            hint="set KUBECONFIG, or get one from whoever runs the cluster; `kdist run` needs none",
            code=Code.UNREACHABLE,
        )
    import yaml

    try:
        return _access(_merge(files), context, asked, files)
    except KdistError:
        raise
    except (yaml.YAMLError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
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
            f"the account of this pod cannot be used: {error}", code=Code.UNREACHABLE
        ) from error


def _merge(files: Sequence[Path]) -> Entry:
    """The files as one: of two entries by one name the first counts, and so does the first current
    context.
    """
    import yaml

    merged: Entry = {"current-context": "", "contexts": {}, "clusters": {}, "users": {}}
    for file in files:
        document = yaml.load(
            file.read_bytes(),
            Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # noqa: S506 - both are safe
        )
        if not isinstance(document, dict):
            raise TypeError(
                f"{file} is {'empty' if document is None else 'no document with fields'}"
            )
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
    merged: Entry, context: str | None, asked: Impersonation, files: Sequence[Path]
) -> Access:
    name = context or merged["current-context"]
    if not name:
        raise ValueError("it names no current-context; choose one with --context")
    chosen = _find(merged, "contexts", name)
    cluster = _find(merged, "clusters", chosen.get("cluster"))
    user = _find(merged, "users", chosen["user"]) if chosen.get("user") else {_FOLDER: Path()}
    _refuse(f"user {chosen.get('user')}", set(user) - _USER - {_FOLDER})
    _refuse(f"cluster {chosen.get('cluster')}", set(cluster) - _CLUSTER - {_FOLDER})
    server = _text(cluster, "server").rstrip("/")
    if urlsplit(server).scheme not in ("http", "https"):
        raise ValueError(
            f"cluster {chosen.get('cluster')}: its server is `{server}`, which is no "
            "address with https://"
        )
    authority = _pem(cluster, "certificate-authority")
    return Access(
        context=str(name),
        namespace=_text(chosen, "namespace") or "default",
        server=server,
        credentials=_credentials(
            user, cluster_info(server, cluster, authority), files=files, context=str(name)
        ),
        impersonation=_impersonate(user, asked),
        authority=authority,
        verify=not cluster.get("insecure-skip-tls-verify"),
        server_name=_text(cluster, "tls-server-name"),
        proxy=_find_proxy(server, _text(cluster, "proxy-url")),
    )


def _refuse(where: str, fields: set[str]) -> None:
    if fields:
        raise KdistError(
            f"the kubeconfig cannot be used: {where} has "
            f"{', '.join(f'`{each}`' for each in sorted(fields))}, "
            "which kdist does not know and cannot honour",
            hint="take it out, or give a kubeconfig without it with --kubeconfig",
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
    authorization = f"Bearer {_text(user, 'token')}" if user.get("token") else ""
    if user.get("username") and not authorization:
        both = f"{_text(user, 'username')}:{_text(user, 'password')}"
        authorization = f"Basic {base64.b64encode(both.encode()).decode()}"
    return Fixed(Credential(authorization, *(_pem(user, name) for name in _CERTIFICATES)))


def _provider(provider: Mapping[str, Any], files: Sequence[Path], context: str) -> CredentialSource:
    """The token of an OpenID provider, which the official client knows how to ask for anew."""
    if provider.get("name") != "oidc":
        raise KdistError(
            (
                f"the kubeconfig cannot be used: auth-provider `{provider.get('name')}` is "
                "gone from Kubernetes' clients"
            ),
            hint="use the plugin that took its place: gke-gcloud-auth-plugin, kubelogin, …",
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


def _impersonate(user: Entry, asked: Impersonation) -> Impersonation:
    return Impersonation(
        asked.user or _text(user, "as"),
        asked.groups or tuple(str(each) for each in user.get("as-groups") or []),
        asked.uid or _text(user, "as-uid"),
        {
            str(key): tuple(map(str, values))
            for key, values in (user.get("as-user-extra") or {}).items()
        },
    )


def _find_proxy(server: str, told: str) -> str:
    """The kubeconfig's proxy, else the environment's, which is not for this machine itself nor for
    what NO_PROXY names.
    """
    from urllib.request import getproxies

    parts = urlsplit(server)
    proxy = told or (
        "" if _is_direct(parts.hostname or "", server) else getproxies().get(parts.scheme, "")
    )
    if proxy and urlsplit(proxy).scheme not in ("http", "https"):
        raise KdistError(
            f"the proxy {proxy} "
            f"{'of the kubeconfig (`proxy-url`)' if told else 'of the environment'} "
            "cannot be used: "
            "kdist speaks to proxies by http:// and https:// only",
            hint=(
                "give the address of an HTTP proxy, or reach the cluster by a tunnel and take "
                "the proxy out"
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
        raise TypeError(f"`{name}` is {value!r} and no text")
    return value


def _pem(part: Mapping[str, Any], name: str) -> str:
    """The text of a certificate or a key, which is in the kubeconfig or in a file beside it."""
    if part.get(f"{name}-data"):
        return base64.b64decode(_text(part, f"{name}-data"), validate=True).decode()
    return (part[_FOLDER] / _text(part, name)).read_text() if part.get(name) else ""
