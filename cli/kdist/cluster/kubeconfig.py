"""Whom to talk to, and as whom: the kubeconfig, or the account of the pod that this runs in."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kdist.cluster import plain
from kdist.errors import Code, KdistError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Access:
    """Whom to talk to, by the names that people know it by.

    `headers` says who we are, anew each time because tokens end; `pool` makes a pool that keeps so many connections; `official`
    gives the official client's configuration, for its websockets.
    """

    context: str
    namespace: str
    server: str
    headers: Callable[[], dict[str, str]]
    pool: Callable[[int], Any]
    official: Callable[[], Any]


def is_there() -> bool:
    """Whether anything says which cluster is meant."""
    return bool(_look()[1]) or _ACCOUNT.joinpath("token").is_file()


def _look() -> tuple[str, list[str]]:
    """Where a kubeconfig is looked for, and the files of it that are there."""
    paths = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    return paths, [path for path in paths.split(os.pathsep) if path and Path(path).is_file()]


def load(context: str | None = None) -> Access:
    """Read the kubeconfig (`$KUBECONFIG`, else `~/.kube/config`); without one, the account of the pod that this runs in.

    Raises `KdistError` (code UNREACHABLE) if there is neither, if the context does not exist, or if it cannot be used.
    """
    paths, files = _look()
    found = plain.read(Path(files[0]), context) if len(files) == 1 else None
    if found is None:
        return _load_officially(paths, files, context)
    return Access(
        found.context, found.namespace, found.server, found.headers, found.pool,
        lambda: _load_officially(paths, files, context).official(),
    )  # fmt: skip


def _load_officially(paths: str, files: list[str], context: str | None) -> Access:
    # The official client holds all of its parts apart from its models in this import; it takes some 200 ms.
    from kubernetes import config
    from kubernetes.client.configuration import Configuration

    configuration = Configuration()
    told = _Told()
    logging.getLogger().addHandler(told)  # a plugin that fails is logged by the client and otherwise passed over
    try:
        if files:
            name, namespace = _use(files, context, configuration)
        elif context is None and _ACCOUNT.joinpath("token").is_file():
            config.load_incluster_config(client_configuration=configuration)
            name, namespace = "in-cluster", _ACCOUNT.joinpath("namespace").read_text().strip() or "default"
        else:
            raise KdistError(
                f"there is no kubeconfig at {paths}",
                hint="set KUBECONFIG, or get one from whoever runs the cluster; `kdist run` needs none",
                code=Code.UNREACHABLE,
            )
    except KdistError:
        raise
    except Exception as error:  # the client raises of its own, of yaml's and of whatever a hand-written file provokes
        raise KdistError(
            f"the kubeconfig cannot be used: {error}", hint=f"it is read from {paths}", code=Code.UNREACHABLE
        ) from error
    finally:
        logging.getLogger().removeHandler(told)
    if told.lines and not configuration.auth_settings():
        raise KdistError(f"no credentials for context {name}: {told.lines[-1]}", code=Code.UNREACHABLE)
    return Access(
        name, namespace, str(configuration.host), partial(_headers, configuration), partial(_pool, configuration),
        lambda: configuration,
    )  # fmt: skip


def _headers(configuration: Any) -> dict[str, str]:
    settings = configuration.auth_settings().values()
    return {each["key"]: each["value"] for each in settings if each["in"] == "header" and each["value"]}


def _pool(configuration: Any, connections: int) -> Any:
    from kubernetes.client.rest import RESTClientObject

    configuration.retries = False  # tries are counted by us, where they can be told of
    configuration.connection_pool_maxsize = connections
    return RESTClientObject(configuration).pool_manager


def _use(files: list[str], context: str | None, configuration: Any) -> tuple[str, str]:
    """Fill the configuration from the files; name and namespace of the context that is used."""
    from kubernetes.config import kube_config

    merged = kube_config.KubeConfigMerger(os.pathsep.join(files))
    if merged.config is None:
        raise ValueError("it is empty")
    loader = kube_config.KubeConfigLoader(
        merged.config, active_context=context, config_base_path=None, config_persister=merged.save_changes
    )
    loader.load_and_set(configuration)
    used = loader.current_context
    return str(used["name"]), str((used.get("context") or {}).get("namespace") or "default")


class _Told(logging.Handler):
    """Keeps what the client logs, which would otherwise go to stderr in its own words."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
