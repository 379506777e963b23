"""What a TrainingJob says counts where it exists, whatever the job's ConfigMap contains."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from kdist.status import JobStatus, Snapshot, WorkloadState
from tests.cli.status.objects import NOW, RUN, Document, at, config_map, pod, report, workload

BOTH = [pod(0), pod(1)]
FIRST = "digits-0-abcde"


def training_job(*, spec: Document | None = None, **status: Any) -> Document:
    """A TrainingJob of four nodes that the controller has acted on."""
    known: Document = {"observedGeneration": 1, "phase": "Running", "message": "it trains"}
    known |= {"backend": "job", "runId": RUN}
    return {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {
            "name": "digits",
            "namespace": "ml",
            "generation": 1,
            "creationTimestamp": at(600),
        },
        "spec": {"nodes": {"min": 2, "max": 4}, "queue": "team", **(spec or {})},
        "status": {**known, **status},
    }


NUMBERS: Document = {
    "step": 90,
    "targetSteps": 500,
    "loss": "0.4312",
    "worldSize": 2,
    "restarts": 3,
    "lastCheckpoint": {"step": 80, "time": at(40)},
}


def look(resource: Document | None, reports: Document | None = None, **more: Any) -> JobStatus:
    reported = more.pop("reported", None) or config_map()
    state = WorkloadState(active=2)
    seen = Snapshot(
        "digits",
        config_map=reported,
        workload=workload(),
        pods=BOTH,
        reports=reports or {},
        state=state,
        taken=NOW.timestamp(),
        resource=resource,
        **more,
    )
    return seen.status


def forge() -> Document:
    """A ConfigMap that somebody has changed who may change ConfigMaps."""
    forged = config_map(backend="statefulset", asked="suspended")
    forged["metadata"]["annotations"]["kdist.dev/run-id"] = "forged"
    job = {
        "metadata": {"name": "other", "namespace": "kube-system"},
        "spec": {"nodes": {"min": 4000, "max": 4096}, "queue": "forged"},
    }
    forged["data"]["job.json"] = json.dumps(job)
    return forged


def test_a_forged_configmap_changes_nothing_that_the_training_job_says() -> None:
    for resource in (training_job(), training_job(spec={"nodes": 4, "replicas": 4})):
        found = look(resource, {FIRST: report()}, reported=forge(), namespace="ml")
        honest = look(resource, {FIRST: report()}, namespace="ml")
        assert found == honest
        assert (found.name, found.namespace, found.queue) == ("digits", "ml", "team")
        assert (found.nodes.max, found.run_id, found.backend) == (4, RUN, "job")
    seen = Snapshot("digits", "ml", forge(), resource=training_job())
    assert seen.job == training_job()
    assert seen.backend == "job"


def test_without_a_training_job_name_and_namespace_are_those_of_the_object() -> None:
    found = look(None, {FIRST: report()}, reported=forge())
    assert (found.name, found.namespace) == ("digits", "ml")


def test_the_training_job_tells_the_numbers_where_no_agent_answers_and_only_there() -> None:
    found = look(training_job(**NUMBERS))
    assert (found.step, found.target_steps, found.loss) == (90, 500, 0.4312)
    assert (found.last_checkpoint_step, found.world_size, found.restarts) == (80, 2, 3)
    assert found.last_checkpoint_time == NOW.timestamp() - 40
    assert found.reason == "NoAnswer"
    assert found.message.endswith("; its TrainingJob says Running: it trains")
    answered = look(training_job(**NUMBERS), {FIRST: report()})
    assert (answered.step, answered.loss, answered.restarts) == (120, 0.25, 0)


@pytest.mark.parametrize("word", ["nan", "NaN"])
def test_a_loss_that_is_no_number_is_one_of_the_training_jobs_too(word: str) -> None:
    found = look(training_job(loss=word)).loss
    assert found is not None
    assert math.isnan(found)


@pytest.mark.parametrize("odd", [{"step": "x", "loss": "x", "lastCheckpoint": 7}, {"step": None}])
def test_numbers_that_cannot_be_read_are_unknown(odd: Document) -> None:
    found = look(training_job(**odd))
    assert (found.step, found.loss, found.last_checkpoint_step) == (None, None, None)


def test_the_log_tells_the_numbers_where_nothing_else_does() -> None:
    event = {"event": "progress", "step": 70, "target": 500, "loss": 0.5, "learning_rate": 0.1}
    found = look(None, progress=event)
    assert (found.step, found.target_steps, found.loss) == (70, 500, 0.5)
    assert look(None, {FIRST: report()}, progress=event).step == 120
    assert look(training_job(**NUMBERS), progress=event).step == 90
