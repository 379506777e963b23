"""Whom to talk to, and as whom: the kubeconfig, or the account of the pod that this runs in."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist.errors import Code, KdistError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Access:
    """A configuration of the official client, with the names that people know it by."""

    configuration: Any
    context: str
    namespace: str
    server: str


def load(context: str | None = None) -> Access:
    """Read the kubeconfig (`$KUBECONFIG`, else `~/.kube/config`); without one, the account of the pod that this runs in.

    Raises `KdistError` (code UNREACHABLE) if there is neither, if the context does not exist, or if it cannot be used.
    """
    # The official client holds all of its parts apart from its models in this import; it takes some 200 ms.
    from kubernetes import config
    from kubernetes.client.configuration import Configuration

    configuration = Configuration()
    paths = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    files = [path for path in paths.split(os.pathsep) if path and Path(path).is_file()]
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
    return Access(configuration, name, namespace, str(configuration.host))


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
