"""The controllers of the workload kinds: the names of their deployments, and whether they are
ready. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from kdist.manifest import QUEUE_GROUP


class Operator(NamedTuple):
    """A project's controller.

    Attributes:
        part: part of its deployment's name.
        project: name of the project.
        needs: (API group, kind) of the objects that it creates.
    """

    part: str
    project: str
    needs: tuple[tuple[str, str], ...] = ()


_JOB_SET: Final = ("jobset.x-k8s.io", "JobSet")
QUEUE: Final = (QUEUE_GROUP, "LocalQueue")
OPERATORS: Final[dict[tuple[str, str], Operator]] = {
    _JOB_SET: Operator("jobset-controller", "JobSet"),
    ("kubeflow.org", "PyTorchJob"): Operator("training-operator", "Kubeflow training-operator 1.9"),
    ("trainer.kubeflow.org", "TrainJob"): Operator(
        "trainer-controller", "Kubeflow Trainer 2.3", (_JOB_SET,)
    ),
    QUEUE: Operator("kueue-controller", "Kueue"),
}
"""Controllers by the (API group, kind) that they act on."""

_SERVICE = re.compile(r'https://(?P<name>[\w-]+)\.(?P<namespace>[\w-]+)\.svc[:/"]')


def find_deployment(
    deployments: Iterable[Mapping[str, Any]], kind: tuple[str, str]
) -> Mapping[str, Any] | None:
    """The deployment of the controller of an (API group, kind); None if none has its name."""
    part = OPERATORS[kind].part
    return next((each for each in deployments if part in each["metadata"]["name"]), None)


def count_ready(deployment: Mapping[str, Any]) -> tuple[int, int]:
    """(ready replicas, desired replicas)."""
    ready = (deployment.get("status") or {}).get("readyReplicas") or 0
    wanted = (deployment.get("spec") or {}).get("replicas")
    return int(ready), 1 if wanted is None else int(wanted)


def find_webhook_home(message: str) -> tuple[str, str]:
    """Whose webhook it is that the API server could not call, to stand after the webhook's name,
    and the command that shows its pods; empty if its message does not say it.
    """
    if (found := _SERVICE.search(message)) is None:
        return "", ""
    name, namespace = found.groups()
    return f" of the service {name} in namespace {namespace}", f"kubectl get pods -n {namespace}"
