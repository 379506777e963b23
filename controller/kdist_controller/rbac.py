"""The rights that the controller needs: one table, from which the chart's roles for it are
generated, and with which tests compare the requests that it sends.
"""

from __future__ import annotations

from typing import Final

from kdist import rbac
from kdist.backends import DEPENDENT_KINDS
from kdist.rbac import Right
from kdist.spec import API_VERSION, KIND

_LEASE: Final = ("coordination.k8s.io/v1", "Lease")


def _on(verbs: str, *kinds: tuple[str, str], part: str = "") -> tuple[Right, ...]:
    return tuple(Right(verb, *kind, part) for kind in kinds for verb in verbs.split())


JOBS: Final = (
    *_on("list watch", (API_VERSION, KIND)),
    *_on("patch", (API_VERSION, KIND), part="status"),
    *_on("get list watch create patch delete", *DEPENDENT_KINDS),
    # the key of a job's exchange, which nobody can read then
    *_on("create", ("v1", "Secret")),
    # only who may do this may grant it to the agents of a job
    *_on("update", ("v1", "ConfigMap")),
    *rbac.workload_rights("get list watch create patch delete"),
    *_on("get list watch patch delete", ("v1", "Pod")),
    *_on("patch", ("v1", "Pod"), part="status"),
    *_on("get list patch", (rbac.KUEUE, "Workload")),
    *_on("list create", ("v1", "Event")),
)
"""In the namespaces whose TrainingJobs it looks after. Changes of the status of pods are confined
further by the chart's ValidatingAdmissionPolicy.
"""
NODES: Final = (
    *_on("get list watch", ("v1", "Node")),
    *_on("get", ("v1", "PersistentVolume")),
    *_on("list", ("storage.k8s.io/v1", "VolumeAttachment")),
)
"""In the cluster, to know which nodes are gone and which volumes they hold."""
NODE_LEASES: Final = _on("list", _LEASE)
"""In the namespace `kube-node-lease`."""
ELECTION: Final = _on("get create patch", _LEASE)
"""In its own namespace."""
