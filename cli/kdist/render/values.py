"""What templates are given: the job as its file writes it, the names and labels of its objects, what was decided elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any, Final

from kdist import backends
from kdist.backends import Placement
from kdist.errors import KdistError
from kdist.render.canonical import rewrite
from kdist.render.templates import Sourced, spread
from kdist.spec import TrainingJob

RENDEZVOUS_PORT: Final = 29_400
METRICS_PORT: Final = 9401
_NOT_THE_PODS: Final = ("backend", "code", "nodes", "queue", "ttlSeconds")
"""Fields of the job that change nothing in its pods, or by more than their own text."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"


def collect(job: TrainingJob, placement: Placement | None) -> dict[str, Any]:
    """The values that every template may use. Without a placement only those of the ConfigMap of a local run."""
    document = job.model_dump(mode="json", by_alias=True)
    values: dict[str, Any] = {
        "name": Sourced(job.metadata.name, "metadata.name"),
        "metadata": _metadata(job),
        "placement": placement,
        "train_json": spread(_write(job.to_train_config().to_document()), "spec"),
        "notes": "\n".join(_notes(job)) + "\n",
    }
    if placement is None:
        return values
    backend, written = backends.get(placement.backend), rewrite(document)
    told = job.to_train_config().to_document()
    nodes = told.pop("nodes")
    return values | {
        "train_json": spread(_write(told), "spec"),
        "train_digest": sha256(_write(told).encode()).hexdigest()[:10],
        "nodes_json": spread(_write(nodes), "spec.nodes"),
        "checkpoint_folder": job.checkpoint_folder,
        "backend": backend,
        "field": _field(written),
        "spec": written["spec"],
        "job_json": spread(_write(document), "spec"),
        "elastic": backends.is_elastic(job),
        "replaced_whole": "jobset" in backend.parts and not backends.is_elastic(job),
        "procs": Sourced(str(job.spec.procs_per_node), "spec.procsPerNode"),
        "backstop": Sourced(backends.backstop(job), "spec.maxRestarts"),
        "job_backstop": Sourced(100 * backends.backstop(job), "spec.maxRestarts"),
        "permanent_codes": backends.list_permanent_codes(),
        "rendezvous": placement.rendezvous,
        "host": f"{backend.first_host(job.metadata.name)}:{RENDEZVOUS_PORT}",
        "metrics_port": METRICS_PORT,
        "selector": {"kdist.dev/job": spread(job.metadata.name, "metadata.name")},
        "workload_labels": {QUEUE_LABEL: Sourced(job.spec.queue, "spec.queue")} if job.spec.queue else {},
        "workload_annotations": {},
        "run_id": placement.run_id,
        "guarded": min(job.spec.nodes.min, job.spec.nodes.max - 1),
    }


def digest_version(job: TrainingJob, code: str) -> str:
    """What tells one version of what the job's pods run from another, with code of that digest; the same at any size."""
    spec = job.model_dump(mode="json", by_alias=True)["spec"]
    told = {name: value for name, value in spec.items() if name not in _NOT_THE_PODS}
    return sha256(_write({**told, "code": code}).encode()).hexdigest()[:10]


def _write(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _metadata(job: TrainingJob) -> Callable[..., dict[str, Any]]:
    """A function for templates: the metadata of an object of that name, with more labels and annotations if it needs any."""
    own = {
        "app.kubernetes.io/name": "kdist",
        "app.kubernetes.io/instance": Sourced(job.metadata.name, "metadata.name"),
        "app.kubernetes.io/component": "training",
        "app.kubernetes.io/managed-by": "kdist",
        "kdist.dev/job": Sourced(job.metadata.name, "metadata.name"),
    }
    labels = {**spread(job.metadata.labels, "metadata.labels"), **own}
    annotations = spread(job.metadata.annotations, "metadata.annotations")

    def metadata(
        suffix: str = "", *, extra_labels: dict[str, Any] | None = None, extra_annotations: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        name = Sourced(job.metadata.name + suffix, "metadata.name")
        found: dict[str, Any] = {"name": name}
        if job.metadata.namespace is not None:
            found["namespace"] = Sourced(job.metadata.namespace, "metadata.namespace")
        found["labels"] = {**labels, **(extra_labels or {})}
        if annotations or extra_annotations:
            found["annotations"] = {**annotations, **(extra_annotations or {})}
        return found

    return metadata


def _field(document: dict[str, Any]) -> Callable[[str], Any]:
    """A function for templates: the value at a path of the job file, marked with that path."""

    def field(path: str) -> Any:
        value: Any = document
        for part in path.split("."):
            value = value[part]
        return spread(value, path)

    return field


def _notes(job: TrainingJob) -> Iterator[str]:
    """What somebody who comes upon the object in a cluster should know."""
    yield f"The training job {job.metadata.name}, rendered by kdist from its job.yaml; change it there and send it again."
    yield "train.json is read by every agent and every rank of the job: the same bytes everywhere, every default written out."


def check(job: TrainingJob, placement: Placement) -> None:
    """Raises `KdistError` with everything that pods need and the job does not say."""
    problems = list(_missing(job, placement))
    if problems:
        hint = "`--set spec.image=REGISTRY/NAME:TAG` gives it for once" if job.spec.image is None else ""
        raise KdistError("; ".join(problems), hint=hint, next_command="kdist explain spec")


def _missing(job: TrainingJob, placement: Placement) -> Iterator[str]:
    if job.spec.image is None:
        yield "spec.image is missing: pods need the image of the trainer"
    for index, data in enumerate(job.spec.data):
        if data.claim is None:
            yield f"spec.data[{index}] is at {data.path} of your own machine; add the claim that holds it on the cluster"
    if job.spec.code is not None and placement.code is None:
        yield f"spec.code: the files of {job.spec.code} were not read"
