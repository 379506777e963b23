"""Objects of a job as an API server shows them, small enough to be read and with the fields that
are decisive in place.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from kdist.backends import workload_kinds

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
RUN = "cafe0001"
IMAGE = "registry/kdist-trainer:1"

Document = dict[str, Any]


def at(seconds_ago: float) -> str:
    """A time as Kubernetes writes it, so many seconds before now."""
    return (NOW - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


MAKER = "uid-workload"
"""Uid of the workload that makes the pods."""


def config_map(
    *,
    least: int = 2,
    most: int = 2,
    standby: int = 0,
    name: str = "digits",
    age: float = 600,
    **annotations: str,
) -> Document:
    """The job's ConfigMap. Annotations are given by what follows `kdist.dev/`."""
    spec: Document = {"nodes": {"min": least, "max": most, "standby": standby}, "maxRestarts": 10}
    spec["checkpoints"] = {"claim": "ckpt"}
    job: Document = {"apiVersion": "kdist.dev/v1alpha1", "kind": "TrainingJob"}
    job |= {"metadata": {"name": name}, "spec": spec}
    reported = {"run-id": RUN, "backend": "job", "rendezvous": "kubernetes", **annotations}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "labels": {"kdist.dev/job": name},
            "annotations": {f"kdist.dev/{key}": value for key, value in reported.items()},
            "creationTimestamp": at(age),
        },
        "data": {"job.json": json.dumps(job)},
    }


def workload(*, name: str = "digits", kind: str = "Job", age: float = 600, **spec: Any) -> Document:
    """The object that makes the pods."""
    return {
        "apiVersion": next((of for of, each in workload_kinds() if each == kind), "batch/v1"),
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": MAKER,
            "labels": {"kdist.dev/job": name},
            "creationTimestamp": at(age),
        },
        "spec": spec,
        "status": {},
    }


def pod(
    index: int,
    *,
    name: str = "",
    node: str | None = "worker-1",
    phase: str = "Running",
    **status: Any,
) -> Document:
    """A pod of the job; `status` adds to, or replaces parts of, what a healthy one says."""
    ready = "True" if phase == "Running" else "False"
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "ContainersReady", "status": ready},
        {"type": "Ready", "status": ready},
    ]
    reported: Document = {"phase": phase, "conditions": conditions, "podIP": f"10.0.0.{index + 1}"}
    if phase == "Running":
        state = {"running": {"startedAt": at(500)}}
        reported["containerStatuses"] = [container(state=state, ready=True)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name or f"digits-{index}-abcde",
            "namespace": "ml",
            "uid": f"uid-{index}",
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": "digits",
                    "uid": MAKER,
                    "controller": True,
                }
            ],
            "labels": {
                "kdist.dev/job": "digits",
                "batch.kubernetes.io/job-completion-index": str(index),
            },
            "creationTimestamp": at(550),
        },
        "spec": {
            "containers": [{"name": "trainer", "image": "registry/kdist-trainer:1"}],
            **({"nodeName": node} if node else {}),
        },
        "status": {**reported, **status},
    }


def container(
    *, state: Document, ready: bool = False, restarts: int = 0, before: Document | None = None
) -> Document:
    """The status of the training's container."""
    return {
        "name": "trainer",
        "ready": ready,
        "restartCount": restarts,
        "containerID": f"containerd://{restarts}",
        "state": state,
        "lastState": before or {},
        "image": IMAGE,
    }


def waiting(reason: str, message: str = "", **more: Any) -> Document:
    """Status of a pod whose container waits."""
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return {"containerStatuses": [container(state=state, **more)]}


URL = "s3://team-data/speech"


def fetching_pod(
    index: int,
    *inits: Document,
    phase: str = "Pending",
    names: tuple[str, ...] = ("fetch-data-0",),
    **status: Any,
) -> Document:
    """A pod whose init containers, by default one that fetches `URL`, have these states."""
    reported = [
        {"name": name, "restartCount": 0, "lastState": {}, **state}
        for name, state in zip(names, inits, strict=True)
    ]
    found = pod(
        index,
        phase=phase,
        initContainerStatuses=reported,
        containerStatuses=[container(state={"waiting": {"reason": "PodInitializing"}})],
        **status,
    )
    found["spec"]["initContainers"] = [
        {"name": name, "args": [f"--url={URL}", "--field=spec.data[0]"]} for name in names
    ]
    return found


RUNS: Document = {"state": {"running": {"startedAt": at(30)}}}


def terminated(
    code: int, reason: str = "Error", record: Document | str | None = None, *, ago: float = 10
) -> Document:
    """A container's end."""
    message = record if isinstance(record, str) else json.dumps(record) if record else ""
    printed = {"exitCode": code, "reason": reason, "message": message, "finishedAt": at(ago)}
    return {"terminated": printed}


def ended_pod(
    index: int, code: int, reason: str = "Error", record: Document | str | None = None, **more: Any
) -> Document:
    """A pod that is over; `more` may hold its `name`, and the seconds `ago` that it ended."""
    end = terminated(code, reason, record, ago=more.get("ago", 10))
    return pod(
        index,
        name=more.get("name", ""),
        phase="Failed" if code else "Succeeded",
        containerStatuses=[container(state=end)],
    )


def unscheduled(index: int, message: str, reason: str = "Unschedulable") -> Document:
    """A pod that found no node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return pod(index, node=None, phase="Pending", conditions=[condition])


def lost_pod(index: int, *, node: str = "worker-2") -> Document:
    """A pod on a node that is silent: its container was ready, the control plane took its readiness
    away.
    """
    found = pod(index, node=node)
    found["status"]["conditions"][2]["status"] = "False"
    return found


def report(
    state: str = "running", *, ranks: tuple[int, ...] = (0,), generation: int = 1, **more: Any
) -> Document:
    """An agent's `/status` document."""
    reported: Document = {
        "job": "digits",
        "run_id": RUN,
        "node": "digits-0-abcde",
        "state": state,
        "phase": "step",
        "generation": generation,
        "world_size": 2,
        "step": 120,
        "target_steps": 500,
        "loss": 0.25,
        "learning_rate": 0.001,
        "last_checkpoint_step": 100,
        "last_checkpoint_time": NOW.timestamp() - 30,
        "samples_per_second": 1000.0,
        "restarts": 0,
        "restarts_remaining": 10,
        "lost_steps": 0,
        "wall_seconds": {},
        "ranks": [rank(each, local) for local, each in enumerate(ranks)],
        "pid": 7,
    }
    return {**reported, **more}


def rank(number: int, local: int = 0) -> Document:
    """One rank in an agent's report."""
    return {
        "rank": number,
        "local_rank": local,
        "step": 120,
        "step_seconds": 0.2,
        "busy_seconds": 0.15,
        "all_reduce_seconds": 0.02 + number / 1000,
        "phase": "step",
        "heartbeat_age": 0.1,
    }


def record(code: int, cause: str | None, *, outcome: str = "failed", **more: Any) -> Document:
    """An exit record as the trainer writes it."""
    reported: Document = {
        "code": code,
        "cause": cause,
        "outcome": outcome,
        "message": "",
        "rank": 1,
    }
    reported |= {
        "node": "digits-1-abcde",
        "step": 42,
        "generation": 1,
        "time": NOW.timestamp() - 10,
    }
    return {**reported, "traceback": [], "collective": None, "primary": True, **more}
