"""The kinds of objects that a job consists of: no other is created, changed or deleted for it."""

from __future__ import annotations

from typing import Final

CLAIM: Final[str] = "PersistentVolumeClaim"
RUNTIME: Final[str] = "TrainingRuntime"
KEY_KIND: Final[tuple[str, str]] = ("v1", "Secret")
"""(API version, kind) of the key of a job's exchange, which is created and nothing else: nobody who
runs kdist needs to read or change Secrets.
"""
_RBAC = "rbac.authorization.k8s.io/v1"

DEPENDENT_KINDS: Final[tuple[tuple[str, str], ...]] = (
    ("v1", "ConfigMap"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("v1", CLAIM),
    (_RBAC, "Role"),
    (_RBAC, "RoleBinding"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
    ("trainer.kubeflow.org/v1alpha1", RUNTIME),
)
"""(API version, kind) of a job's objects besides its workload, which owns pods and what controllers
create.
"""
