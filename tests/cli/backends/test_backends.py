"""Workload kinds next to their templates: which is chosen, how it is steered, what its status says,
what is warned of.
"""

from __future__ import annotations

from typing import Any

import pytest

from kdist import backends
from kdist.backends import WorkloadState, choose, choose_rendezvous, list_permanent_codes
from kdist.deploy.delete import find_others, split
from kdist.errors import KdistError
from kdist.manifest import Manifest
from kdist.spec import Exit, Spec
from kdist.status import OUTCOME, ExitRecord
from tests.manifests.jobs import make

KINDS = pytest.mark.parametrize("name", backends.NAMES)
ELASTIC = {"min": 1, "max": 3}
CLAIM = {"claim": "c"}


def test_there_is_a_backend_for_every_name_that_a_job_may_use() -> None:
    backend = Spec.model_fields["backend"].annotation
    assert ("auto", *backends.NAMES) == backend.__args__  # type: ignore[union-attr]
    with pytest.raises(KdistError, match="no backend `nonsense`"):
        backends.get("nonsense")


def test_a_job_of_another_group_is_not_taken_for_an_indexed_job() -> None:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "controller": True}
    assert backends.find("batch/v1", "Job") is backends.get("job")
    assert backends.is_made_for({"metadata": {"ownerReferences": [owner]}}, "digits")
    document = {**owner, "apiVersion": "batch.volcano.sh/v1alpha1", "metadata": {"name": "digits"}}
    owned: dict[str, Any] = {"metadata": {"ownerReferences": [document]}}
    assert backends.find(document["apiVersion"], "Job") is None
    assert not backends.is_made_for(owned, "digits")
    assert find_others(owned, "digits") == [document]
    assert split([Manifest(document)]) == ([], [Manifest(document)]), "no workload of ours"


@pytest.mark.parametrize(
    ("kinds", "nodes", "chosen"),
    [
        (set(), 2, "job"),
        ({("kubeflow.org/v1", "PyTorchJob")}, 2, "job"),
        ({("jobset.x-k8s.io/v1alpha2", "JobSet")}, 2, "jobset"),
        ({("jobset.x-k8s.io/v1alpha2", "JobSet")}, ELASTIC, "job"),
        ({("jobset.x-k8s.io/v1alpha2", "JobSet")}, {"min": 2, "max": 2, "standby": 1}, "job"),
    ],
)
def test_auto_takes_a_jobset_where_there_is_one_unless_the_job_needs_another_kind(
    kinds: Any, nodes: Any, chosen: str
) -> None:
    assert choose(kinds, make(nodes=nodes)) == chosen


def test_the_rendezvous_is_kubernetes_where_a_role_may_be_made() -> None:
    assert choose_rendezvous(make()) == "kubernetes"
    assert choose_rendezvous(make(), may_create_role=False) == "c10d"
    assert choose_rendezvous(make(rendezvous="kubernetes"), may_create_role=False) == "kubernetes"
    with pytest.raises(KdistError, match="rendezvous: file is for `kdist run`"):
        choose_rendezvous(make(rendezvous="file"))


def test_the_permanent_codes_are_those_below_128() -> None:
    ours = {code.value for code in Exit if code and not code.retryable}
    assert set(list_permanent_codes()) == ours | {1, 2, 126, 127}
    assert max(list_permanent_codes()) < 128


@KINDS
def test_all_pods_of_a_job_have_the_same_selector(name: str) -> None:
    assert backends.get(name).pod_selector("digits") == "kdist.dev/job=digits"


def condition(kind: str, **more: str) -> dict[str, Any]:
    return {
        "conditions": [
            {"type": "Suspended", "status": "False"},
            {"type": kind, "status": "True", **more},
        ]
    }


ENDS = {
    "job": ("Complete", "Failed"),
    "pytorchjob": ("Succeeded", "Failed"),
    "jobset": ("Completed", "Failed"),
    "trainjob": ("Complete", "Failed"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_workload_is_read_from_its_conditions(name: str) -> None:
    read = backends.get(name).read
    good, bad = ENDS[name]
    assert read({"status": condition(good)}).finished == "succeeded"
    state = read({"status": condition(bad, reason="PodFailurePolicy", message="exit code 70")})
    assert state.finished == "failed"
    assert state.reason == "PodFailurePolicy"
    assert state.message == "exit code 70"
    assert read({"status": {"conditions": [{"type": bad, "status": "False"}]}}).finished is None


@KINDS
def test_a_workload_without_a_status_says_nothing(name: str) -> None:
    assert backends.get(name).read({}) == WorkloadState()
    assert (
        backends.get(name).read({"spec": None, "status": None, "metadata": None}) == WorkloadState()
    )


@KINDS
def test_the_patch_that_suspends_is_what_reads_as_suspended(name: str) -> None:
    backend = backends.get(name)
    assert backend.read(backend.suspend_patch(True, nodes=2)).suspended
    assert not backend.read(backend.suspend_patch(False, nodes=2)).suspended


def test_the_pods_of_a_job_are_counted() -> None:
    status = {"active": 2, "ready": 1, "succeeded": 3, "failed": 4}
    assert backends.get("job").read({"status": status}) == WorkloadState(
        active=2, ready=1, succeeded=3, failed=4
    )
    counts = {"replicaStatuses": {"Worker": {"active": 2, "succeeded": 3, "failed": 4}}}
    assert backends.get("pytorchjob").read({"status": counts}) == WorkloadState(
        active=2, succeeded=3, failed=4
    )
    pods = {"replicas": 2, "readyReplicas": 1}
    assert backends.get("statefulset").read({"status": pods}) == WorkloadState(active=2, ready=1)


@pytest.mark.parametrize(("code", "finished"), [(0, "succeeded"), (70, "failed")])
def test_a_statefulset_has_ended_when_somebody_wrote_its_outcome_down_and_took_its_pods(
    code: int, finished: str
) -> None:
    backend = backends.get("statefulset")
    record = ExitRecord(code=code, cause="user_code", message="boom").to_text()
    workload = {"metadata": {"annotations": {OUTCOME: record}}, "spec": {"replicas": 0}}
    state = backend.read(workload)
    assert (state.finished, state.suspended, state.message) == (finished, False, "boom")
    assert backend.suspend_patch(False, nodes=3) == {
        "metadata": {"annotations": {OUTCOME: None}},
        "spec": {"replicas": 3},
    }


def find(name: str, part: str, rendezvous: str = "", **spec: Any) -> list[str]:
    return [
        each
        for each in backends.get(name).warnings(
            make(**{"nodes": ELASTIC, "checkpoints": CLAIM, **spec}), rendezvous
        )
        if part in each
    ]


@pytest.mark.parametrize("name", ["job", "jobset", "trainjob"])
def test_a_job_that_asks_for_nothing_special_is_warned_of_nothing(name: str) -> None:
    assert find(name, "") == []


@KINDS
def test_every_warning_names_a_reason_and_another_way(name: str) -> None:
    for spec in (
        {},
        {"nodes": 2},
        {"checkpoints": None},
        {"queue": "q"},
        {"checkpoints": {"path": "x"}},
    ):
        for warning in find(name, "", "c10d", **spec):
            assert ";" in warning, warning


@KINDS
def test_more_nodes_than_have_formed_a_group_together_are_not_accepted_in_silence(
    name: str,
) -> None:
    train = {"workload": "digits", "epochs": 1, "globalBatch": 4096}
    assert find(name, "4,096 nodes: how long more than 64", nodes=4096, train=train)
    assert not find(name, "how long more than 64", nodes=64, train=train)


@KINDS
def test_what_is_lost_with_a_pod_or_a_node_is_said(name: str) -> None:
    assert find(name, "a lost pod loses all", checkpoints=None)
    assert find(name, "a lost pod loses all", checkpoints={"path": "here"})
    assert not find(name, "a lost pod loses all", checkpoints={"url": "s3://bucket/runs"})
    assert not find(name, "ReadWriteMany", checkpoints={"url": "s3://bucket/runs"})
    assert find(name, "ReadWriteMany", checkpoints={"size": "1Gi", "accessMode": "ReadWriteOnce"})
    assert not find(
        name, "ReadWriteMany", checkpoints={"size": "1Gi", "accessMode": "ReadWriteOnce"}, nodes=1
    )
    assert find(name, "losing it restarts all pods", "c10d")


@KINDS
def test_a_job_whose_pods_nothing_admits_together_is_reported_queues(name: str) -> None:
    assert find(name, "spec.queue (Kueue) admits a job as a whole", nodes=2)
    assert not find(name, "admits a job as a whole", nodes={"min": 1, "max": 2})
    assert not find(name, "admits a job as a whole", nodes=2, queue="q")
    assert not find(
        name, "admits a job as a whole", nodes=2, podTemplate={"spec": {"schedulerName": "volcano"}}
    )


@KINDS
def test_what_to_do_about_a_dead_node_is_left_to_why(name: str) -> None:
    assert not find(name, "node.kubernetes.io", nodes=2)


def test_what_a_kind_alone_cannot_do_is_said() -> None:
    assert find("statefulset", "never completes")
    assert find("pytorchjob", "never deletes a job that failed")
    assert find("statefulset", "Kueue", queue="q")
    for name in ("pytorchjob", "jobset", "trainjob"):
        assert find(name, "then it cannot be scaled", queue="q")
    assert find("job", "has quota for all 3 nodes", queue="q")


@KINDS
def test_how_slowly_lost_pods_come_back_is_said_where_the_others_wait_for_them(name: str) -> None:
    assert bool(find(name, "after 10 s, doubled with each further loss up to 10 min", nodes=2)) is (
        name == "job"
    )
    assert not find(name, "after 10 s"), "an elastic job goes on with the others"
