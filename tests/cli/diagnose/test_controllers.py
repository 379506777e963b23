"""A job that waits in its queue, and controllers that do not run, are told apart and named."""

from __future__ import annotations

import pytest

from kdist.diagnose import Diagnosis, diagnose
from kdist.status import WorkloadState
from tests.cli.diagnose.scenes import scene
from tests.cli.status.objects import Document, config_map, workload

QUEUED = {
    **workload(),
    "metadata": {**workload()["metadata"], "labels": {"kueue.x-k8s.io/queue-name": "team-a"}},
}


def queued(reason: str, message: str, **more: str) -> Diagnosis:
    conditions = [
        {"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}
    ]
    conditions += [{"type": kind, "status": "True", "reason": why} for kind, why in more.items()]
    admission = {"metadata": {"name": "job-digits-1"}, "status": {"conditions": conditions}}
    return diagnose(
        scene([], state=WorkloadState(suspended=True), over=QUEUED, admission=admission)
    )


def test_a_queue_without_room_is_reported_in_its_own_words() -> None:
    printed = (
        "couldn't assign flavors to pod set main: insufficient unused quota for cpu in "
        "flavor default, 2 more needed"
    )
    found = queued("Pending", printed)
    assert (found.cause, found.severity) == ("queued", "waiting")
    assert "2 more needed" in found.sentence


def test_a_job_that_is_larger_than_its_queue_waits_in_vain() -> None:
    printed = (
        "couldn't assign flavors to pod set main: insufficient quota for cpu in flavor default, "
        "previously considered podsets requests (0) + current podset request (4) > "
        "maximum capacity (2)"
    )
    found = queued("Pending", printed)
    assert (found.cause, found.severity) == ("queue-too-small", "blocked")


def test_a_queue_that_does_not_exist_is_reported_from_one_that_is_full() -> None:
    found = queued("Inadmissible", "LocalQueue team-a doesn't exist")
    assert (found.cause, found.commands) == ("queue-unusable", ("kubectl get localqueues -n ml",))


def test_a_job_that_was_preempted_by_its_queue_says_so() -> None:
    printed = "Preempted to accommodate a higher priority Workload"
    assert "Preempted" in queued("Pending", printed, Evicted="Preempted").sentence


def test_a_queue_that_takes_no_notice_is_named() -> None:
    found = diagnose(scene([], state=WorkloadState(suspended=True), over=QUEUED))
    assert "Kueue may not be running" in found.sentence


def deployment(name: str, place: str, *, ready: int = 0, wanted: int = 0) -> Document:
    about = {"name": name, "namespace": place}
    return {
        "metadata": about,
        "spec": {"replicas": wanted},
        "status": {"readyReplicas": ready} if ready else {},
    }


JOBSET = deployment("jobset-controller-manager", "jobset-system")
TRAINER = deployment("kubeflow-trainer-controller-manager", "kubeflow-system", ready=1, wanted=1)


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_a_controller_that_is_seen_to_be_away_is_named_within_seconds(kind: str) -> None:
    made = workload(kind=kind, age=8)
    seen = scene(
        [],
        over=made,
        reported=config_map(age=8),
        state=WorkloadState(),
        deployments=[TRAINER, JOBSET],
    )
    found = diagnose(seen)
    assert found.cause == "operator-absent"
    assert found.sentence == (
        f"no pods have been created for the {kind} for 8.0 s: "
        "the controller of JobSet does not run: 0 of 0 replicas of "
        "jobset-system/jobset-controller-manager are ready"
    )
    away = "kubectl describe deployment jobset-controller-manager -n jobset-system"
    assert found.commands[0] == away
    unseen = scene([], over=made, reported=config_map(age=8), state=WorkloadState())
    assert diagnose(unseen).cause == "starting", "it may need a moment"


def test_a_controller_that_may_not_be_seen_is_called_by_what_it_is_called_mostly() -> None:
    seen = scene([], over=workload(kind="PyTorchJob", age=40), state=WorkloadState())
    found = diagnose(seen)
    assert found.sentence.endswith(
        "its controller (a deployment called *training-operator*) may not be running"
    )


def test_a_kueue_that_does_not_run_is_named_and_not_its_queue() -> None:
    kueue = deployment("kueue-controller-manager", "kueue-system", wanted=1)
    found = diagnose(
        scene([], state=WorkloadState(suspended=True), over=QUEUED, deployments=[kueue])
    )
    assert (found.cause, found.severity) == ("operator-absent", "blocked")
    assert "the controller of Kueue does not run: 0 of 1 replicas" in found.sentence
