"""`kdist recover --avoid`: a job leaves a node that is faulty and stays away from it for a time; no
other job does, and nothing but its own pod there is deleted.
"""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest

from kdist.backends import NAMES
from kdist.diagnose import diagnose
from kdist.errors import Code
from kdist.recovery import avoidance
from kdist.recovery.avoidance import name_marker
from kdist.render.overlay import violations
from kdist.status import AVOIDED, JobStatus
from kdist.status.agent_status import read_machine_faults
from tests.cli.cluster.api import Api, Asked, Reply, refusal
from tests.cli.cluster.conftest import serve
from tests.cli.conftest import JOB, Kdist
from tests.cli.diagnose.scenes import scene
from tests.cli.recovery.cluster import FIRST, SECOND, BrokenCluster
from tests.cli.recovery.test_recover import Send, api, send
from tests.cli.status.objects import Document, at, pod, unscheduled

__all__ = ["api", "send", "serve"]

MARKER = f"/apis/batch/v1/namespaces/ml/jobs/{name_marker('digits', 'worker-2')}"
TERM = {"topologyKey": "kubernetes.io/hostname"}
REFUSED = "0/1 nodes are available: 1 node(s) didn't match pod anti-affinity rules."


class Faulty(BrokenCluster):
    """A cluster whose nodes answer, and whose Jobs get their pods, unless `starved`."""

    def __init__(self) -> None:
        super().__init__()
        self.starved = False
        for name in ("worker-1", "worker-2"):
            self.put(f"/api/v1/nodes/{name}", {"metadata": {"name": name}})

    def place_pods(self, backend: str, **metadata: Any) -> None:
        """The pods of a job that was rendered by this version: they refuse the job's markers."""
        super().place_pods(backend, **metadata)
        for path in (FIRST, SECOND):
            rule = {**TERM, "labelSelector": {"matchLabels": {"kdist.dev/avoid": "digits"}}}
            terms = {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}
            self.objects[path]["spec"]["affinity"] = {"podAntiAffinity": terms}

    def _get(self, asked: Asked) -> Reply:
        if "nodes" in self.forbidden and asked.path.startswith("/api/v1/nodes/"):
            what = 'cannot get resource "nodes" at the cluster scope'
            return refusal(403, f'nodes is forbidden: User "jane" {what}', "Forbidden")
        return super()._get(asked)

    def _post(self, asked: Asked) -> Reply:
        if asked.body["kind"] != "Job":
            return super()._post(asked)
        path = f"{asked.path}/{asked.body['metadata']['name']}"
        if path in self.objects:
            return refusal(409, "already exists", "AlreadyExists")
        if "dryRun" not in asked.query:
            status = {} if self.starved else {"active": 1}
            metadata = {**asked.body["metadata"], "uid": path}
            self.put(path, {**asked.body, "metadata": metadata, "status": status})
        return Reply(201, asked.body)


@pytest.fixture
def broken() -> BrokenCluster:
    return Faulty()


def deleted(api: Api) -> list[str]:
    """What was asked to be deleted, in the order of the requests."""
    return [each.path for each in api.asked if each.method == "DELETE"]


@pytest.mark.parametrize("backend", NAMES)
def test_a_node_is_marked_before_the_job_s_own_pod_there_is_deleted_and_nothing_else(
    backend: str, api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send(backend)
    before = copy.deepcopy({path: each for path, each in broken.objects.items() if path != SECOND})
    result = kdist("recover", "digits", "--avoid", "worker-2", "--for=12h")
    assert result.exit_code == Code.OK, result.stderr
    assert result.stdout.splitlines() == [
        "worker-2 is avoided for 12h",
        "digits-1-abcde saves and ends, and starts on another node",
    ]
    marker = broken.objects.pop(MARKER)
    assert {path: each for path, each in broken.objects.items() if path != SECOND} == before
    assert broken.objects[SECOND]["metadata"]["deletionTimestamp"], "it has its grace period"
    order = [each.path for each in api.asked if each.method in ("POST", "DELETE")]
    assert order[-2:] == [MARKER.rpartition("/")[0], SECOND]
    assert deleted(api) == [SECOND]
    spec = marker["spec"]["template"]["spec"]
    assert (spec["nodeName"], spec["tolerations"]) == ("worker-2", [{"operator": "Exists"}])
    assert spec["containers"][0]["image"] == "registry/kdist-trainer:1"
    assert 43_100 < marker["spec"]["activeDeadlineSeconds"] <= 43_200
    assert marker["spec"]["template"]["metadata"]["labels"] == {
        "kdist.dev/avoid": "digits",
        "app.kubernetes.io/managed-by": "kdist",
    }, "the job's own label would count it for the job's budget and its network"


def test_a_restricted_namespace_and_a_quota_admit_the_marker(
    broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    broken.objects[SECOND]["spec"] |= {"priorityClassName": "high"}
    assert kdist("recover", "digits", "--avoid=worker-2").exit_code == Code.OK
    template = broken.objects[MARKER]["spec"]["template"]
    assert violations(template) == []
    assert template["spec"]["priorityClassName"] == "high", "a lower one could be preempted"
    (container,) = template["spec"]["containers"]
    assert {*container["resources"]["requests"], *container["resources"]["limits"]} == {
        "cpu",
        "memory",
    }
    assert set(container["resources"]["requests"].values()) == {"0"}, "a full node takes it too"


@pytest.mark.parametrize("mode", ["client", "server"])
def test_a_dry_run_names_the_pod_and_changes_nothing(
    mode: str, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    broken._delete = lambda asked: Reply() if asked.body.get("dryRun") else pytest.fail("sent")  # type: ignore[method-assign]
    before = copy.deepcopy(broken.objects)
    result = kdist("recover", "digits", "--avoid=worker-2", f"--dry-run={mode}")
    assert result.exit_code == Code.OK, result.stderr
    assert f"worker-2 is avoided for 24h ({mode} dry run)" in result.stdout
    assert "digits-1-abcde" in result.stdout
    assert broken.objects == before


def test_a_node_may_be_avoided_before_a_pod_is_there_and_allowed_again(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    broken.objects[SECOND]["spec"]["nodeName"] = "worker-1"
    found = json.loads(kdist("recover", "digits", "--avoid=worker-2", "-o", "json").stdout)
    assert (found["kind"], found["node"], found["pods"]) == ("Avoidance", "worker-2", [])
    assert "avoids" in kdist("status", "digits").stdout
    (avoided,) = json.loads(kdist("status", "digits", "-o", "json").stdout)["avoided"]
    assert (avoided["node"], avoided["faults"]) == ("worker-2", None)
    assert "let its pods use a node again" not in kdist("why", "digits").stdout
    assert "avoids: the job avoids worker-2 until" in kdist("why", "digits").stdout
    result = kdist("recover", "digits", "--allow", "worker-2")
    assert result.stdout == "worker-2 may be used again\n"
    assert deleted(api) == [MARKER]
    again = kdist("recover", "digits", "--allow", "worker-2")
    assert again.exit_code == Code.USAGE
    assert "--allow worker-2: digits does not avoid that node" in again.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--avoid=worker-7"], "--avoid worker-7: there is no such node"),
        (["--avoid=worker-2", "--node-is-off=worker-1"], "choose one of --node-is-off, --avoid"),
        (["--avoid=worker-2", "--allow=worker-1"], "choose one of --node-is-off, --avoid"),
        (["--for=1h"], "--for belongs to --avoid"),
        (["--allow=worker-2"], "digits does not avoid that node"),
    ],
)
def test_options_that_cannot_be_meant_change_nothing(
    options: list[str],
    message: str,
    api: Api,
    broken: BrokenCluster,
    send: Send,
    kdist: Kdist,
) -> None:
    send()
    before = copy.deepcopy(broken.objects)
    result = kdist("recover", "digits", *options)
    assert result.exit_code == Code.USAGE
    assert message in result.stderr
    assert broken.objects == before
    assert deleted(api) == []


def test_pods_of_an_earlier_version_are_left_where_they_are(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    for path in (FIRST, SECOND):
        del broken.objects[path]["spec"]["affinity"]
    result = kdist("recover", "digits", "--avoid=worker-2")
    assert result.exit_code == Code.ERROR
    assert "digits has no pod that would stay away from worker-2" in result.stderr
    assert "kdist restart digits -n ml" in result.stderr
    assert MARKER not in broken.objects
    assert deleted(api) == []


def test_no_pod_is_deleted_before_the_marker_has_its_own(
    api: Api,
    broken: BrokenCluster,
    send: Send,
    kdist: Kdist,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send()
    monkeypatch.setattr(broken, "starved", True)
    monkeypatch.setattr(avoidance, "_PATIENCE_SECONDS", 0.3)
    result = kdist("recover", "digits", "--avoid=worker-2")
    assert result.exit_code == Code.TIMEOUT
    assert "so no pod of digits was deleted" in result.stderr
    assert deleted(api) == []


def test_a_node_that_is_avoided_already_is_avoided_for_the_time_of_the_last_command(
    broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    assert kdist("recover", "digits", "--avoid=worker-2", "--for=1h").exit_code == Code.OK
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 600))
    broken.objects[MARKER]["status"]["startTime"] = started
    result = kdist("recover", "digits", "--avoid=worker-2", "--for=7d")
    assert result.exit_code == Code.OK, result.stderr
    assert "worker-2 is avoided for 7d" in result.stdout
    marker = broken.objects[MARKER]
    assert abs(marker["spec"]["activeDeadlineSeconds"] - 7 * 86_400 - 600) < 60
    wanted = json.loads(marker["metadata"]["annotations"][AVOIDED])
    assert abs(wanted["until"] - time.time() - 7 * 86_400) < 60


def test_a_job_of_somebody_else_with_the_name_of_the_marker_is_left_alone(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    broken.put(MARKER, {"metadata": {"name": MARKER.rpartition("/")[2]}, "status": {"active": 1}})
    before = copy.deepcopy(broken.objects)
    result = kdist("recover", "digits", "--avoid=worker-2")
    assert result.exit_code == Code.ERROR
    assert "does not belong to job digits" in result.stderr
    assert broken.objects == before
    assert deleted(api) == []


@pytest.mark.parametrize(("marked", "stays"), [(30, True), (5, False)])
def test_a_pod_that_came_after_that_of_the_marker_stays(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist, marked: int, stays: bool
) -> None:
    send()
    assert kdist("recover", "digits", "--avoid=worker-2").exit_code == Code.OK
    broken.objects[MARKER]["metadata"]["creationTimestamp"] = at(60)
    of_marker = {"name": "marker", "labels": {"kdist.dev/avoid": "digits"}}
    of_marker |= {"creationTimestamp": at(marked)}
    pod = {"metadata": of_marker, "spec": {"nodeName": "worker-2"}}
    broken.put(f"{SECOND.rpartition('/')[0]}/marker", pod)
    metadata = broken.objects[SECOND]["metadata"]
    del metadata["deletionTimestamp"]
    metadata["creationTimestamp"] = at(10)
    result = kdist("recover", "digits", "--avoid=worker-2")
    assert result.exit_code == (Code.ERROR if stays else Code.OK)
    assert ("digits-1-abcde came to worker-2 after that was marked" in result.stderr) == stays
    assert deleted(api) == [SECOND] * (1 if stays else 2)


@pytest.mark.parametrize("job", [f"{JOB}  podTemplate: {{spec: {{nodeName: worker-2}}}}\n"])
def test_pods_whose_template_names_a_node_are_refused(
    api: Api, broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    result = kdist("recover", "digits", "--avoid=worker-2")
    assert result.exit_code == Code.ERROR
    assert "podTemplate names a node for the pods of digits" in result.stderr
    assert MARKER not in broken.objects
    assert deleted(api) == []


def test_who_may_not_read_nodes_may_avoid_one_and_change_for_how_long(
    broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    broken.forbidden = {"nodes"}
    assert kdist("recover", "digits", "--avoid=worker-3").exit_code == Code.OK
    result = kdist("recover", "digits", "--avoid=worker-3", "--for=1h")
    assert result.exit_code == Code.OK, result.stderr


def test_a_missing_right_is_named_before_a_marker_is_made(
    broken: BrokenCluster, send: Send, kdist: Kdist
) -> None:
    send()
    broken.may_not = {"delete pods"}
    result = kdist("recover", "digits", "--avoid=worker-2")
    assert result.exit_code == Code.FORBIDDEN
    assert MARKER not in broken.objects


def marker(
    node: str = "worker-1", *, until: object = None, faults: object = None, **metadata: Any
) -> Document:
    """A marker as the API server shows it."""
    name = name_marker("digits", node)
    wanted = {"node": node, "until": time.time() + 3600 if until is None else until}
    wanted |= {} if faults is None else {"faults": faults}
    annotations = {AVOIDED: json.dumps(wanted), "kdist.dev/owner": f"digits/job/{name}"}
    metadata = {"name": name, "annotations": annotations, **metadata}
    return {"metadata": metadata, "status": {"active": 1}}


def status(*markers: Document) -> JobStatus:
    return scene([pod(0)], markers=markers).status


def test_a_job_that_waits_for_the_only_nodes_that_it_avoids_says_so() -> None:
    cause = diagnose(scene([unscheduled(0, REFUSED)], markers=[marker(), marker("worker-2")]))
    assert cause.cause == "nodes-avoided"
    assert "finds no node: the job avoids worker-1 until " in cause.sentence
    assert cause.commands == tuple(
        f"kdist recover digits -n ml --allow worker-{number}" for number in (1, 2)
    )
    assert cause.also == ()
    other = diagnose(scene([unscheduled(0, REFUSED)]))
    assert other.cause == "unschedulable", "the user's own podAntiAffinity"


def test_only_the_job_s_own_marker_that_has_not_ended_counts() -> None:
    assert [each.node for each in status(marker()).avoided] == ["worker-1"]
    ended = {**marker(), "status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    for other in (
        ended,
        {**marker(), "status": {}},  # without a pod it keeps none away
        marker(""),
        marker(254 * "n"),
        marker(annotations={}),
        marker(annotations={**marker()["metadata"]["annotations"], AVOIDED: "{"}),
        marker(name="copied"),
    ):
        assert status(other).avoided == ()
    rubbish: object
    for rubbish in (1e300, "nan", -5, [], True):
        (found,) = status(marker(until=rubbish)).avoided
        assert found.until == 0.0
        assert str(found).startswith("worker-1 until ")
    for told, read in ((1e300, 1_000_000), (-1, 0), ("x", None)):
        (found,) = status(marker(faults=told)).avoided
        assert found.faults == read


def test_faults_that_an_agent_tells_are_within_the_limits_of_the_status() -> None:
    told = [{"machine": "n", "faults": each} for each in (1e300, -1, 3)]
    found = read_machine_faults({"faults": told}, "faults")
    assert [each.faults for each in found] == [1_000_000, 0, 3]
