"""The key of a job's exchange: a Secret with a random value, which is created once and mounted into
the job's pods. Nobody who runs kdist reads it: the only right on Secrets is to create them.

Its owner, the job's own ConfigMap or its TrainingJob, has the garbage collector delete it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from kdist import backends, manifest, render
from kdist.deploy.plan import Plan
from kdist.manifest import Manifest

if TYPE_CHECKING:
    from kdist.backends import Placement
    from kdist.cluster import Applied, JobObjects
    from kdist.spec import TrainingJob

_KEY_BYTES: Final = 32


def provide_key(objects: JobObjects, plan: Plan, made: Manifest, applied: Applied) -> Applied:
    """Create the key once the job's own ConfigMap, its owner, exists; returns the result of that
    one, with a warning if there is no right to create the key.

    Args:
        objects: what creates the job's objects.
        plan: the job.
        made: an object of the job.
        applied: the result of applying it.
    """
    if (made.kind, made.name) != ("ConfigMap", plan.job.metadata.name):
        return applied
    owner = {
        "apiVersion": "v1",
        "kind": made.kind,
        "name": made.name,
        "uid": applied.document["metadata"]["uid"],
    }
    warning = create_key(objects, plan.job, plan.placement, owner)
    return replace(applied, warnings=(*applied.warnings, warning)) if warning else applied


def create_key(
    objects: JobObjects, job: TrainingJob, placement: Placement, owner: Mapping[str, Any]
) -> str:
    """Create the key of a job's exchange, unless it exists; returns why that is not possible, or
    nothing. Then the job's agents exchange through the ConfigMap of their rendezvous.

    Args:
        objects: what creates the job's objects.
        job: the job.
        placement: how it is placed.
        owner: the owner reference of the Secret.
    """
    from kdist.cluster import ApiError

    if placement.rendezvous != "kubernetes":
        return ""  # where agents share a store that is no ConfigMap
    name = render.name_exchange_secret(job, placement)
    document = {
        "apiVersion": backends.KEY_KIND[0],
        "kind": backends.KEY_KIND[1],
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/managed-by": "kdist",
                manifest.JOB_LABEL: job.metadata.name,
            },
            "annotations": {
                manifest.OWNER: manifest.mark(job.metadata.name, backends.KEY_KIND[1], name)
            },
            "ownerReferences": [{**owner, "controller": False, "blockOwnerDeletion": False}],
        },
        "type": "kdist.dev/exchange-key",
        "immutable": True,
        "stringData": {"key": secrets.token_hex(_KEY_BYTES)},
    }
    try:
        objects.create(document)
    except ApiError as error:
        if error.status == HTTPStatus.CONFLICT:
            return ""  # it is made once
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        return (
            f"secret/{name} could not be created ({error}): the job's agents exchange through the "
            "ConfigMap alone, and notice later which of them are lost"
        )
    return ""
