"""The controllers of the workload kinds: the names of their deployments, and whether they are
ready. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Operator(NamedTuple):
    """A project's controller.

    Attributes:
        part: part of its deployment's name.
        project: name of the project.
        needs: kinds of the objects that it creates.
    """

    part: str
    project: str
    needs: tuple[str, ...] = ()


OPERATORS: dict[str, Operator] = {
    "JobSet": Operator("jobset-controller", "JobSet"),
    "PyTorchJob": Operator("training-operator", "Kubeflow training-operator 1.9"),
    "TrainJob": Operator("trainer-controller", "Kubeflow Trainer 2.3", ("JobSet",)),
    "LocalQueue": Operator("kueue-controller", "Kueue"),
}

_SERVICE = re.compile(r'https://(?P<name>[\w-]+)\.(?P<namespace>[\w-]+)\.svc[:/"]')


def find_deployment(
    deployments: Iterable[Mapping[str, Any]], kind: str
) -> Mapping[str, Any] | None:
    """The deployment of a kind's controller; None if none has its name."""
    part = OPERATORS[kind].part
    return next((each for each in deployments if part in each["metadata"]["name"]), None)


def count_ready(deployment: Mapping[str, Any]) -> tuple[int, int]:
    """(ready replicas, desired replicas)."""
    ready = (deployment.get("status") or {}).get("readyReplicas") or 0
    wanted = (deployment.get("spec") or {}).get("replicas")
    return int(ready), 1 if wanted is None else int(wanted)


def find_webhook_home(message: str) -> tuple[str, str] | None:
    """(service, namespace) of the webhook that the API server could not call; None if its message
    does not contain them.
    """
    found = _SERVICE.search(message)
    return (found["name"], found["namespace"]) if found else None
