"""Each workload kind: which exit code leads to what, what an operator's default would break, what
waits and what goes.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from kdist import backends
from kdist.spec import Exit
from tests.manifests.jobs import make, place, workload

KINDS = pytest.mark.parametrize("backend", backends.NAMES)
JOBS = pytest.mark.parametrize("backend", ["job", "jobset", "trainjob"])


def find_spec(backend: str, *, suspended: bool = False, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = workload(place(make(**spec), backend, suspended=suspended), backend)[
        "spec"
    ]
    return found


def find_jobset(backend: str, **spec: Any) -> dict[str, Any]:
    manifests = place(make(**spec), backend)
    if backend == "jobset":
        found: dict[str, Any] = workload(manifests, backend)["spec"]
        return found
    (runtime,) = [each.document for each in manifests if each.kind == "TrainingRuntime"]
    template: dict[str, Any] = runtime["spec"]["template"]["spec"]
    return template


def find_job(backend: str, **spec: Any) -> dict[str, Any]:
    if backend == "job":
        return find_spec(backend, **spec)
    (replicated,) = find_jobset(backend, **spec)["replicatedJobs"]
    found: dict[str, Any] = replicated["template"]["spec"]
    return found


def decide(backend: str, code: int, *, disrupted: bool = False, **spec: Any) -> str:
    """What becomes of a pod whose container ended so: the first rule of the podFailurePolicy that
    fits, else it counts.

    Where that fails a Job which a JobSet made, what the JobSet does then.
    """
    for number, rule in enumerate(find_job(backend, **spec)["podFailurePolicy"]["rules"]):
        codes = rule.get("onExitCodes")
        if (codes is not None and code in codes["values"]) or (codes is None and disrupted):
            action = str(rule["action"])
            return (
                action
                if backend == "job" or action != "FailJob"
                else follow(backend, number, **spec)
            )
    return "Count"


def follow(backend: str, number: int, **spec: Any) -> str:
    """What the JobSet does about a Job that this rule of its podFailurePolicy failed, in the Job
    controller's words.
    """
    message = (
        "Container trainer for pod ml/digits-node-0-1-x failed with exit code 1 matching "
        f"FailJob rule at index {number}"
    )
    for rule in find_jobset(backend, **spec)["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if "PodFailurePolicy" in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return str(rule["action"])
    return "RestartJobSet"


@JOBS
@pytest.mark.parametrize("code", [code for code in Exit if code])
def test_what_another_try_cannot_help_fails_the_job(backend: str, code: Exit) -> None:
    fails = "FailJob" if backend == "job" else "FailJobSet"
    wanted = "Ignore" if code == Exit.STOPPED else "Count" if code.retryable else fails
    assert decide(backend, code, nodes={"min": 1, "max": 2}) == wanted


@JOBS
@pytest.mark.parametrize(
    ("code", "permanent"), [(1, True), (127, True), (137, False), (143, False)]
)
def test_codes_of_the_system_follow_the_same_rule(backend: str, code: int, permanent: bool) -> None:
    fails = "FailJob" if backend == "job" else "FailJobSet"
    for nodes in (2, {"min": 1, "max": 2}):
        assert decide(backend, code, nodes=nodes) == (fails if permanent else "Count")


@JOBS
@pytest.mark.parametrize("code", [Exit.STOPPED, Exit.USER, 137])
def test_a_pod_that_was_taken_away_is_never_counted(backend: str, code: int) -> None:
    assert decide(backend, code, disrupted=True, nodes={"min": 1, "max": 2}) == "Ignore"


@pytest.mark.parametrize("backend", ["jobset", "trainjob"])
def test_a_jobset_whose_pods_are_all_needed_begins_again_when_one_is_taken_away(
    backend: str,
) -> None:
    # the Job would let the others wait, longer with each further loss
    restart_all = "RestartJobSetAndIgnoreMaxRestarts"
    assert decide(backend, Exit.STOPPED, nodes=2) == restart_all
    assert decide(backend, 137, disrupted=True, nodes=2) == restart_all
    assert decide(backend, Exit.USER, nodes=2) == "FailJobSet"
    assert decide(backend, 137, nodes=2) == "Count", (
        "a pod killed for its memory stays to be looked at"
    )


@JOBS
def test_every_node_may_be_lost_more_often_than_the_jobs_own_budget_allows(backend: str) -> None:
    job = find_job(backend, maxRestarts=7)
    assert 100 * 7 < job["backoffLimit"] < 2**31
    # with it, no namespace that holds the job can be deleted
    assert "backoffLimitPerIndex" not in job
    assert job["podReplacementPolicy"] == "Failed"
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)


@JOBS
def test_nodes_that_never_came_do_not_block_the_end(backend: str) -> None:
    assert find_job(backend, nodes={"min": 2, "max": 4})["successPolicy"] == {
        "rules": [{"succeededCount": 2}]
    }


@JOBS
def test_where_all_nodes_are_needed_no_pod_is_taken_away_while_it_ends(backend: str) -> None:
    assert "successPolicy" not in find_job(backend, nodes=2)


@KINDS
def test_scaling_changes_no_pod(backend: str) -> None:
    few, many = (
        workload(place(make(nodes=nodes), backend), backend) for nodes in (2, {"min": 1, "max": 5})
    )
    many = backends.get(backend).keep(many, few)
    for spec in (few["spec"], many["spec"]):
        replicas = spec.get("pytorchReplicaSpecs", {}).get("Worker", spec)
        for name in ("completions", "parallelism", "replicas"):
            replicas.pop(name, None)
        spec.pop("elasticPolicy", None)
        spec.get("runPolicy", {}).pop("schedulingPolicy", None)
    assert (few == many) is (backends.get(backend).scalable == "")


@KINDS
def test_replicas_amount_to_a_smaller_maximum(backend: str) -> None:
    scaled = place(make(nodes={"min": 1, "max": 4, "standby": 1}, replicas=2), backend)
    assert scaled == place(make(nodes={"min": 1, "max": 2, "standby": 1}), backend)


@pytest.mark.parametrize("backend", ["jobset", "trainjob"])
def test_a_jobset_fails_at_once_where_its_job_may_not_be_tried_again(backend: str) -> None:
    policy = find_jobset(backend, maxRestarts=7, nodes={"min": 1, "max": 2})["failurePolicy"]
    assert policy["rules"] == [
        {"name": "permanent", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    assert policy["maxRestarts"] == 7


def test_a_pytorchjob_has_workers_only_and_every_default_written_out() -> None:
    spec = find_spec("pytorchjob", nodes={"min": 1, "max": 3}, ttlSecondsAfterFinished=60)
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]
    assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert spec["nprocPerNode"] == "auto"
    assert spec["elasticPolicy"]["minReplicas"] == 1
    assert spec["elasticPolicy"]["maxReplicas"] == 3
    assert spec["runPolicy"]["cleanPodPolicy"] == "Running"
    assert spec["runPolicy"]["ttlSecondsAfterFinished"] == 60
    assert "elasticPolicy" not in find_spec("pytorchjob", nodes=2)


def test_a_trainjob_has_a_runtime_of_its_own_that_trainer_accepts() -> None:
    spec = find_spec("trainjob")
    expected = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "digits"}
    assert spec["runtimeRef"] == expected
    assert spec["trainer"] == {"numNodes": 2}
    (replicated,) = find_jobset("trainjob")["replicatedJobs"]
    assert replicated["name"] == "node"
    assert replicated["replicas"] == 1
    assert (
        replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
        == "trainer"
    )
    assert [
        each["name"] for each in replicated["template"]["spec"]["template"]["spec"]["containers"]
    ] == ["node"]


def test_a_statefulset_starts_all_at_once_and_changes_nothing_by_itself() -> None:
    spec = find_spec("statefulset")
    assert spec["podManagementPolicy"] == "Parallel"
    update = spec["updateStrategy"]
    assert update == {"type": "RollingUpdate", "rollingUpdate": {"partition": 2**31 - 1}}, (
        "a lost pod comes back as it was"
    )
    assert spec["serviceName"] == "digits"
    assert spec["template"]["spec"]["restartPolicy"] == "Always"


def find_suspension(backend: str, **more: Any) -> Any:
    spec = find_spec(backend, **more)
    if backend == "statefulset":
        return spec["replicas"] == 0
    return spec.get("runPolicy", spec).get("suspend")


@KINDS
def test_a_suspended_job_is_sent_so_and_any_other_says_that_it_is_not(backend: str) -> None:
    assert find_suspension(backend, suspended=True) is True
    assert find_suspension(backend) is False


@KINDS
def test_a_job_with_a_queue_leaves_its_suspension_to_kueue(backend: str) -> None:
    document = workload(place(make(queue="team-a"), backend), backend)
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert find_suspension(backend, queue="team-a") in (None, False)
    elastic = document["metadata"].get("annotations", {}).get("kueue.x-k8s.io/elastic-job")
    assert elastic == ("true" if backend == "job" else None)


@KINDS
def test_the_objects_of_an_ended_job_go_after_a_while_where_the_kind_can_do_that(
    backend: str,
) -> None:
    text = str(
        [
            each.document
            for each in place(make(ttlSecondsAfterFinished=4242), backend)
            if each.kind != "ConfigMap"
        ]
    )
    assert ("'ttlSecondsAfterFinished': 4242" in text) is (backend != "statefulset")


def test_pod_0_of_an_indexed_job_has_the_name_by_which_the_others_look_for_it() -> None:
    manifests = place(make(rendezvous="c10d"), "job", rendezvous="c10d")
    pod = workload(manifests, "job")["spec"]["template"]["spec"]
    (service,) = [each.document for each in manifests if each.kind == "Service"]
    (argument,) = [
        each for each in pod["containers"][0]["args"] if each.startswith("--rendezvous=")
    ]
    name = service["metadata"]["name"]
    assert pod["subdomain"] == name, (
        "the name of the headless Service, else DNS does not know the pods' host names"
    )
    expected = f"{name}-0.{pod['subdomain']}"
    assert argument.removeprefix("--rendezvous=c10d:").partition(":")[0] == expected
