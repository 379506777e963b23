"""`kdist recover`: the job's own pods on a node that is gone are given up, each as its kind of
workload needs it, and nothing else is touched.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kdist.backends import NAMES
from kdist.errors import Code
from tests.cli.cluster.api import Api, Asked, Reply, write_kubeconfig
from tests.cli.cluster.conftest import Serve, serve
from tests.cli.conftest import Kdist
from tests.cli.recovery.cluster import FIRST, SECOND, BrokenCluster
from tests.cli.status.objects import Document, at

__all__ = ["serve"]

OFF = ("--node-is-off", "worker-2")
Send = Callable[..., None]
REUSES_NAMES = ("statefulset", "pytorchjob")


@pytest.fixture
def broken() -> BrokenCluster:
    return BrokenCluster()


@pytest.fixture
def api(
    broken: BrokenCluster, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Api:
    api = serve(broken)
    write_kubeconfig(tmp_path / "config", api.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return api


@pytest.fixture
def send(api: Api, broken: BrokenCluster, kdist: Kdist, job: str, tmp_path: Path) -> Send:
    """Send the job and lose its node: `send("jobset")`."""

    def sent(
        backend: str = "job", *, mode: str = "ReadWriteMany", bucket: str = "", **metadata: str
    ) -> None:
        document = yaml.safe_load(job)
        document["spec"] |= {
            "image": "registry.example.com/trainer:1",
            "backend": backend,
            "nodes": 2,
            "checkpoints": {"url": bucket} if bucket else {"size": "1Gi", "accessMode": mode},
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
        result = kdist("apply", "job.yaml")
        assert result.exit_code == Code.OK, result.stderr
        broken.place_pods(backend, **metadata)

    return sent


def others(broken: BrokenCluster) -> dict[str, Document]:
    """Every object but the pod that is given up."""
    return {path: copy.deepcopy(each) for path, each in broken.objects.items() if path != SECOND}


def changes(api: Api) -> list[str]:
    """Requests that change pods."""
    return [
        f"{each.method} {each.path}"
        for each in api.asked
        if each.method in ("PATCH", "DELETE") and each.path.startswith(SECOND.rpartition("/")[0])
    ]


@pytest.mark.parametrize("backend", NAMES)
def test_only_the_pod_on_the_node_that_is_gone_is_given_up_as_its_kind_needs_it(
    backend: str, api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send(backend)
    before, pod = others(broken), copy.deepcopy(broken.objects[SECOND])
    result = kdist("recover", "digits")
    assert result.exit_code == Code.OK, result.stderr
    assert result.stdout.startswith("given up digits-1-abcde: node worker-2 does not answer")
    assert "Next: kdist wait digits -n ml --for=first-step" in result.stderr
    assert others(broken) == before
    (patch,) = (each.body for each in api.asked if each.path == f"{SECOND}/status")
    identity = {key: pod["metadata"][key] for key in ("uid", "resourceVersion")}
    assert patch["metadata"] == identity
    assert patch["status"]["phase"] == "Failed"
    *kept, added = patch["status"]["conditions"]
    assert kept == pod["status"]["conditions"]
    assert (added["type"], added["status"], added["reason"]) == (
        "DisruptionTarget",
        "True",
        "NodeLost",
    )
    assert (SECOND in broken.objects) is (backend not in REUSES_NAMES)


def test_a_bucket_is_storage_that_all_nodes_share(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send(bucket="s3://bucket/runs")
    broken.answers = {}
    result = kdist("recover", "digits", "--no-wait")
    assert "kdist waits 40 s longer" in result.stdout, "its lock is trusted"
    assert not [each.path for each in api.asked if "digits-checkpoints" in each.path]


@pytest.mark.parametrize("backend", NAMES)
def test_a_pod_that_waits_to_be_deleted_is_removed_too(
    backend: str, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send(backend, deletionTimestamp=at(20))
    before = others(broken)
    assert kdist("recover", "digits").exit_code == Code.OK
    assert others(broken) == before
    assert SECOND not in broken.objects


def test_a_pod_of_another_owner_is_not_touched_though_it_bears_the_job_s_labels(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    broken.objects[SECOND]["metadata"]["ownerReferences"][0]["uid"] = "theirs"
    result = kdist("recover", "digits", *OFF)
    assert result.exit_code == Code.ERROR
    assert "waits digits-1-abcde: the pod was not created for job digits" in result.stdout
    assert changes(api) == []


@pytest.mark.parametrize("backend", ["jobset", "trainjob"])
def test_a_job_in_between_that_the_workload_has_not_created_owns_no_pod_of_it(
    backend: str, api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send(backend)
    between = next(path for path in broken.objects if path.endswith("jobs/digits-node-0"))
    broken.objects[between]["metadata"]["ownerReferences"] = [{"uid": "theirs"}]
    assert kdist("recover", "digits", *OFF).exit_code == Code.ERROR
    assert changes(api) == []


def test_a_pod_that_changes_after_it_was_judged_is_judged_once_more(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    races = iter([True])

    def answer(asked: Asked) -> Reply:
        if asked.path == f"{SECOND}/status" and next(races, False):
            broken.put(SECOND, broken.objects[SECOND])
        return broken(asked)

    api.answer = answer
    assert kdist("recover", "digits").exit_code == Code.OK
    assert changes(api) == [f"PATCH {SECOND}/status"] * 2
    assert broken.objects[SECOND]["status"]["phase"] == "Failed"


def test_a_pod_that_its_controller_has_replaced_meanwhile_keeps_its_name(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send("statefulset")
    fresh = {"metadata": {"name": "digits-1-abcde", "uid": "fresh"}}

    def answer(asked: Asked) -> Reply:
        if asked.method == "DELETE":
            broken.put(SECOND, fresh)
        return broken(asked)

    api.answer = answer
    assert kdist("recover", "digits").exit_code == Code.OK
    assert broken.objects[SECOND] is fresh


def test_a_missing_right_is_named_before_anything_is_changed(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    broken.may_not = {"patch pods"}
    result = kdist("recover", "digits")
    assert result.exit_code == Code.FORBIDDEN
    assert "nothing was changed: you are `jane`, who may not patch pods/status" in result.stderr
    assert changes(api) == []


@pytest.mark.parametrize("mode", ["client", "server"])
def test_a_dry_run_shows_the_evidence_and_changes_nothing(
    mode: str, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send("statefulset")
    before = copy.deepcopy(broken.objects)
    result = kdist("recover", "digits", f"--dry-run={mode}")
    assert result.exit_code == Code.OK, result.stderr
    assert result.stdout.startswith("would be given up digits-1-abcde: ")
    assert f"({mode} dry run)" in result.stdout
    assert "| lease/worker-2: renewed 1:00 before the newest Lease" in result.stdout
    assert broken.objects == before


def test_without_evidence_it_says_why_it_waits_and_what_to_type(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send(mode="ReadWriteOnce")
    broken.answers.clear()
    result = kdist("recover", "digits")
    assert result.exit_code == Code.ERROR
    assert "claim digits-checkpoints can be mounted by one node only" in result.stdout
    certain = "if the machine is certainly off: kdist recover digits -n ml --node-is-off worker-2"
    assert certain in result.stderr
    assert changes(api) == []
    assert kdist("recover", "digits", *OFF).exit_code == Code.OK
    assert changes(api) == [f"PATCH {SECOND}/status"]


@pytest.mark.parametrize("what", ["nodes", "leases"])
def test_who_may_not_read_nodes_has_to_vouch_for_one(
    what: str, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    broken.forbidden = {what}
    result = kdist("recover", "digits")
    assert result.exit_code == Code.ERROR
    assert f"you are `jane`, who may not list {what} in the whole cluster" in result.stdout
    assert kdist("recover", "digits", *OFF).exit_code == Code.OK
    assert broken.objects[SECOND]["status"]["phase"] == "Failed"
    assert broken.objects[FIRST]["status"]["phase"] == "Running"


def test_a_node_that_has_no_pod_of_the_job_is_a_slip_of_the_pen(
    api: Api, send: Send, kdist: Kdist
) -> None:
    send()
    result = kdist("recover", "digits", "--node-is-off", "worker-3")
    assert result.exit_code == Code.USAGE
    assert "--node-is-off worker-3: no pod of digits is on that node" in result.stderr
    assert "its pods are on worker-1, worker-2" in result.stderr
    assert changes(api) == []


def test_it_waits_for_a_lease_to_run_out_unless_told_not_to(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    lease = broken.lists["leases"][-1]
    lease["spec"]["renewTime"] = at(39.5)
    result = kdist("recover", "digits", "--no-wait")
    assert result.exit_code == Code.TIMEOUT
    assert "the Lease of node worker-2 has not run out yet" in result.stdout
    looks = iter([39.5])

    def answer(asked: Asked) -> Reply:
        if asked.path.endswith("/leases"):
            lease["spec"]["renewTime"] = at(next(looks, 60))
        return broken(asked)

    api.answer = answer
    result = kdist("recover", "digits", "--timeout=1m")
    assert result.exit_code == Code.OK, result.stderr
    assert "digits-1-abcde: the Lease of node worker-2 has not run out yet" in result.stderr
    assert broken.objects[SECOND]["status"]["phase"] == "Failed"


def test_a_job_whose_nodes_all_answer_needs_nothing(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    for node in broken.lists["nodes"]:
        node["status"]["conditions"][0]["status"] = "True"
    for lease in broken.lists["leases"]:
        lease["spec"]["renewTime"] = at(9)
    result = kdist("recover", "digits")
    assert result.exit_code == Code.OK
    assert result.stdout == "all nodes of digits answer: there is nothing to recover\n"
    assert changes(api) == []


def test_programs_get_the_decision_with_its_evidence(send: Send, kdist: Kdist) -> None:
    send("statefulset")
    document = json.loads(kdist("recover", "digits", "-o", "json").stdout)
    (pod,) = document["pods"]
    assert (document["kind"], document["job"]) == ("Recovery", "digits")
    assert (pod["pod"], pod["node"], pod["reason"]) == ("digits-1-abcde", "worker-2", "NodeLost")
    assert (pod["recover"], pod["marked"], pod["deleted"]) == (True, True, True)
    assert len(pod["evidence"]) == 3


def test_a_volume_that_keeps_the_new_pod_waiting_is_named_with_the_time_it_takes(
    broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send(mode="ReadWriteOnce")
    claim = next(path for path in broken.objects if path.endswith("/digits-checkpoints"))
    broken.objects[claim]["spec"]["volumeName"] = "pvc-1"
    source = {"persistentVolumeName": "pvc-1"}
    broken.lists["attachments"] = [{"spec": {"nodeName": "worker-2", "source": source}}]
    result = kdist("recover", "digits")
    assert result.exit_code == Code.OK
    assert "claim digits-checkpoints is attached to node worker-2" in result.stderr
    assert "detaches it by force 6:00 min after the pod there has ended" in result.stderr


def test_a_volume_that_is_only_on_the_node_that_is_gone_keeps_its_pod(
    broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    claim = next(path for path in broken.objects if path.endswith("/digits-checkpoints"))
    broken.objects[claim]["spec"]["volumeName"] = "pv-1"
    host = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["worker-2"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [host]}]}
    local = {"metadata": {"name": "pv-1"}, "spec": {"nodeAffinity": {"required": terms}}}
    broken.put("/api/v1/persistentvolumes/pv-1", local)
    result = kdist("recover", "digits", "--no-wait", *OFF)
    assert result.exit_code == Code.TIMEOUT
    assert "is on node worker-2 and nowhere else" in result.stdout
    assert broken.objects[SECOND]["status"]["phase"] == "Running"
