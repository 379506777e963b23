"""A snapshot holds all of a job, asked for in few requests; what may not be read is left out."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kdist.cluster import Cluster
from kdist.errors import KdistError, NotFoundError
from kdist.job import cluster as jobs
from kdist.job.cluster.snapshot import Events, finalize
from kdist.manifest import OWNER, mark
from kdist.status import Phase, Snapshot, read_pod
from tests.cli.cluster.api import refusal
from tests.cli.cluster.conftest import Connect, Serve
from tests.cli.diagnose.scenes import event
from tests.cli.job.cluster.world import FIRST, SECOND, World, lines
from tests.cli.status.objects import (
    RUNS,
    config_map,
    fetching_pod,
    lost_pod,
    pod,
    record,
    report,
    terminated,
    unscheduled,
    workload,
)


@pytest.mark.parametrize(
    "owners",
    [
        [],
        [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": "digits",
                "uid": "another",
                "controller": True,
            }
        ],
    ],
)
def test_a_pod_with_the_jobs_label_that_its_workload_has_not_made_counts_for_nothing(
    world: World, serve: Serve, connect: Connect, owners: list[dict[str, Any]]
) -> None:
    foreign = pod(0, name="impostor", phase="Failed")
    foreign["metadata"]["ownerReferences"] = owners
    world.pods.append(foreign)
    world.reports["impostor"] = report("failed", generation=9999)
    seen = jobs.fetch_snapshot(connect(serve(world).url), "digits")
    assert (seen.status.phase, str(seen.status.nodes)) == (Phase.RUNNING, "2/2")
    assert "impostor" not in seen.reports
    assert "impostor" not in {pod["metadata"]["name"] for pod in seen.pods}


def test_a_snapshot_is_whole_and_takes_few_requests(
    world: World, serve: Serve, connect: Connect
) -> None:
    world.events = [
        event("Started", "x"),
        event("Started", "of another job", name="digits-2-0-zzzzz"),
        event("Pulled", "x", name=SECOND),
    ]
    api = serve(world)
    seen = jobs.fetch_snapshot(connect(api.url), "digits")
    assert seen.status.phase == Phase.RUNNING
    assert seen.status.step == 120
    assert str(seen.status.nodes) == "2/2"
    assert set(seen.reports) == {FIRST, SECOND}
    assert len(seen.events) == 2
    assert len(api.asked) == 7


def test_there_is_no_job_without_any_object_of_it(cluster: Cluster, world: World) -> None:
    world.config_map, world.workload, world.pods = None, None, []
    with pytest.raises(NotFoundError, match="no job digits in namespace ml"):
        jobs.fetch_snapshot(cluster, "digits")


def test_what_may_not_be_read_is_left_out(cluster: Cluster, world: World) -> None:
    world.forbidden = {"/events", "/nodes", "/proxy"}
    world.pods = [pod(0), unscheduled(1, "0/2 nodes are available: 2 Insufficient cpu.")]
    seen = jobs.fetch_snapshot(
        cluster, "digits", agents=jobs.Agents(cluster, namespace="ml", max_tunnels=0)
    )
    assert (seen.events, seen.nodes, seen.reports) == ((), {}, {})


def test_a_pod_that_answers_is_not_lost_whatever_the_control_plane_says_after_an_outage(
    cluster: Cluster, world: World
) -> None:
    world.pods = [pod(0), lost_pod(1)]
    status = jobs.fetch_snapshot(cluster, "digits").status
    assert (status.phase, status.reason, str(status.nodes)) == (Phase.RUNNING, "", "2/2")
    del world.reports[SECOND]
    status = jobs.fetch_snapshot(cluster, "digits").status
    assert (status.phase, status.reason, str(status.nodes)) == (Phase.RUNNING, "NodeLost", "1/2")


def test_controllers_are_looked_for_closely_where_nobody_makes_pods(
    world: World, serve: Serve, connect: Connect
) -> None:
    about = {"name": "jobset-controller-manager", "namespace": "jobset-system"}
    found = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about}
    world.deployments = [found]
    cluster = connect(serve(world).url)
    assert jobs.fetch_snapshot(cluster, "digits", controllers=True).deployments == [], (
        "there are pods"
    )
    world.pods = []
    assert jobs.fetch_snapshot(cluster, "digits").deployments == []
    assert list(jobs.fetch_snapshot(cluster, "digits", controllers=True).deployments) == [found]
    world.forbidden = {"/deployments"}
    assert list(jobs.fetch_snapshot(cluster, "digits", controllers=True).deployments) == []


def test_pods_that_may_not_be_listed_are_an_error(cluster: Cluster, world: World) -> None:
    world.forbidden = {"/pods"}
    with pytest.raises(KdistError):
        jobs.fetch_snapshot(cluster, "digits")


def test_a_survey_shows_every_job_with_its_numbers(cluster: Cluster) -> None:
    found = jobs.list_snapshots(cluster)
    assert [(seen.name, seen.status.phase, seen.status.step) for seen in found] == [
        ("digits", Phase.RUNNING, 120)
    ]


def test_a_survey_shows_a_job_whose_config_map_is_gone_by_what_its_workload_tells(
    cluster: Cluster, world: World
) -> None:
    assert world.workload is not None
    world.config_map = None
    assert jobs.list_snapshots(cluster) == [], "it bears no mark of a job"
    marked = {OWNER: mark("digits", "Job", "digits")}
    world.workload["metadata"] |= {"annotations": marked, "labels": {"team": "vision"}}
    (seen,) = jobs.list_snapshots(cluster)
    status = seen.status
    assert (seen.name, status.phase, status.step) == ("digits", Phase.RUNNING, 120)
    assert (status.backend, str(status.nodes)) == ("job", "2/2")
    del world.workload["metadata"]["annotations"]
    world.pods = []
    assert jobs.list_snapshots(cluster) == []


def test_a_survey_reads_no_code_and_a_job_again_only_when_it_has_changed(
    world: World, serve: Serve, connect: Connect
) -> None:
    assert world.config_map
    code = config_map(name="digits-code-0a1b2c")
    code["metadata"]["labels"] = world.config_map["metadata"]["labels"]
    world.others = [code]
    api = serve(world)
    cluster, known = connect(api.url), dict[str, Any]()
    for _ in range(3):
        (seen,) = jobs.list_snapshots(cluster, known=known)
    listed = [asked for asked in api.asked if asked.path.endswith("/configmaps")]
    assert all("as=PartialObjectMetadataList" in asked.headers["accept"] for asked in listed)
    assert [
        asked.path.rpartition("/")[2] for asked in api.asked if "/configmaps/" in asked.path
    ] == ["digits"]
    world.config_map["metadata"]["resourceVersion"] = "2"
    world.config_map["data"] = config_map(most=4)["data"]
    assert str(seen.status.nodes) == "2/2"
    assert str(jobs.list_snapshots(cluster, known=known)[0].status.nodes) == "2/4"


def test_events_are_listed_once_and_then_watched(
    world: World, serve: Serve, connect: Connect
) -> None:
    world.events = [event("Started", "x")]
    api = serve(world)
    cluster = connect(api.url)
    events = Events(cluster, "ml")
    while len(seen := jobs.fetch_snapshot(cluster, "digits", events=events).events) < 2:
        world.events = [event("Started", "x"), event("BackOff", "x")]
    assert [each["reason"] for each in seen] == ["Started", "BackOff"]
    asked = [each for each in api.asked if each.path.endswith("/events")]
    assert len([each for each in asked if "watch" not in each.query]) == 1


def test_events_that_may_be_listed_and_not_watched_are_listed_each_time(
    world: World, serve: Serve, connect: Connect
) -> None:
    world.events = [event("Started", "x")]
    api = serve(
        lambda asked: refusal(403, "no", "Forbidden") if "watch" in asked.query else world(asked)
    )
    cluster = connect(api.url)
    events = Events(cluster, "ml")
    assert len(jobs.fetch_snapshot(cluster, "digits", events=events).events) == 1
    world.events = [event("Started", "x"), event("BackOff", "x", name=SECOND)]
    while len(seen := jobs.fetch_snapshot(cluster, "digits", events=events).events) < 2:
        assert len(seen) == 1, "the watch has not been refused yet"


class Agent(BaseHTTPRequestHandler):
    """An agent's `/status`."""

    def do_GET(self) -> None:
        """Answer as an agent does."""
        body = json.dumps(report(step=77)).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class CutOff:
    """A connection whose proxy does not reach the pods, and whose forwarded ports do."""

    def __init__(self) -> None:
        self.proxied = 0

    def proxy(self, *_: Any, **__: Any) -> bytes:
        self.proxied += 1
        raise KdistError("i/o timeout")

    @contextmanager
    def forward(self, *_: Any, **__: Any) -> Iterator[int]:
        with HTTPServer(("127.0.0.1", 0), Agent) as server:
            thread = threading.Thread(target=server.handle_request)
            thread.start()
            yield server.server_port
            thread.join()


def test_agents_behind_a_policy_are_asked_over_a_forwarded_port_and_from_then_on() -> None:
    cut: Any = CutOff()
    agents = jobs.Agents(cut, namespace="ml")
    for _ in range(2):
        assert agents.poll([read_pod(pod(0))])[FIRST]["step"] == 77
    assert cut.proxied == 1


class Crowd:
    """A connection to many pods, all of whose agents are as quick as `seconds` says."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def proxy(self, *_: Any, **__: Any) -> bytes:
        time.sleep(self.seconds)
        return json.dumps(report()).encode()


class Viewer:
    """A cluster behind a policy, as it is for who may use the proxy and forward no port."""

    namespace = "ml"

    def __init__(self, *verbs: str) -> None:
        self.verbs = verbs
        self.reviews = 0

    def proxy(self, *_: Any, **__: Any) -> bytes:
        raise KdistError("refused")

    forward = proxy

    def rules(self) -> list[dict[str, Any]]:
        self.reviews += 1
        return [
            {"verbs": ["get"], "apiGroups": [""], "resources": ["pods/proxy"]},
            {"verbs": [*self.verbs], "apiGroups": [""], "resources": ["pods/portforward"]},
        ]

    def can_i(self, *_: Any, **__: Any) -> bool:
        return False


def test_who_cannot_reach_the_agents_is_told_what_is_missing_and_which_role_has_it() -> None:
    viewer: Any = Viewer()
    agents = jobs.Agents(viewer, namespace="ml")
    pods = [read_pod(pod(0)), read_pod(pod(1))]
    for _ in range(3):
        assert agents.poll(pods) == {}
        lack = agents.lack()
    assert "live numbers of 2 pods are missing" in lack
    assert "a NetworkPolicy may keep out" in lack
    assert "create pods/portforward" in lack
    assert "the edit role of kdist's chart" in lack
    assert viewer.reviews == 1, "they are asked for once"
    editor: Any = Viewer("create", "get")
    agents = jobs.Agents(editor, namespace="ml")
    agents.poll(pods)
    assert agents.lack() == "", "nothing but an agent that does not answer"


def test_the_agents_of_all_pods_are_asked_however_many_there_are() -> None:
    crowd: Any = Crowd(0.0)
    agents = jobs.Agents(crowd, namespace="ml")
    assert len(agents.poll([read_pod(pod(index)) for index in range(700)])) == 700
    assert agents.skipped == 0


def test_agents_for_which_there_is_no_time_are_counted_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kdist.job.cluster.agents._TOTAL_TIMEOUT", 0.01)
    slow: Any = Crowd(0.02)
    agents = jobs.Agents(slow, namespace="ml")
    pods = [pod(index) for index in range(100)]
    answers = agents.poll([read_pod(each) for each in pods])
    assert 0 < agents.skipped == 100 - len(answers)
    seen = Snapshot("digits", "ml", pods=pods, reports=answers, skipped=agents.skipped)
    assert f"{agents.skipped} of the 100 pods" in seen.gap


def test_many_nodes_are_asked_for_at_once(world: World, serve: Serve, connect: Connect) -> None:
    world.pods = [pod(index, node=f"worker-{index}", phase="Pending") for index in range(30)]
    api = serve(world)
    jobs.fetch_snapshot(connect(api.url), "digits")
    assert [asked.path for asked in api.asked if "/nodes" in asked.path] == ["/api/v1/nodes"]


def kept_alive(state: str, exit_record: dict[str, Any]) -> World:
    """A StatefulSet whose agents stay after their end."""
    found = World()
    assert found.config_map
    found.config_map["metadata"]["annotations"]["kdist.dev/backend"] = "statefulset"
    found.reports = {name: report(state, exit=exit_record) for name in (FIRST, SECOND)}
    return found


@pytest.mark.parametrize(
    ("state", "code", "cause"), [("succeeded", 0, None), ("failed", 70, "user_code")]
)
def test_work_that_is_over_and_cannot_end_is_taken_away_with_its_outcome(
    state: str, code: int, cause: str | None, serve: Serve, connect: Connect
) -> None:
    done = kept_alive(state, record(code, cause, outcome="done" if code == 0 else "failed"))
    cluster = connect(serve(lambda asked: _as_statefulset(done, asked)).url)
    seen = jobs.fetch_snapshot(cluster, "digits")
    assert finalize(cluster, seen)
    assert done.patches[0]["spec"] == {"replicas": 0}
    assert (
        json.loads(done.patches[0]["metadata"]["annotations"]["kdist.dev/outcome"])["code"] == code
    )


def test_a_statefulset_whose_data_cannot_be_fetched_is_taken_away_with_that_outcome(
    serve: Serve, connect: Connect
) -> None:
    world = kept_alive("running", {})
    world.reports = {}
    wrong = record(65, "data", message="spec.data[0]: the SHA-256 of a is b", rank=None)
    backs_off = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    world.pods = [fetching_pod(0, {**backs_off, "lastState": terminated(65, record=wrong)})]
    cluster = connect(serve(lambda asked: _as_statefulset(world, asked)).url)
    assert finalize(cluster, jobs.fetch_snapshot(cluster, "digits"))
    assert world.patches[0]["spec"] == {"replicas": 0}
    outcome = json.loads(world.patches[0]["metadata"]["annotations"]["kdist.dev/outcome"])
    assert (outcome["code"], outcome["cause"]) == (65, "data")


def test_how_far_pods_have_fetched_is_read_from_the_logs_of_their_init_containers(
    cluster: Cluster, world: World
) -> None:
    def tell(event: str, **fields: Any) -> str:
        stamp = "2026-01-31T12:00:00.000Z"
        return json.dumps({"time": stamp, "event": event, "level": "info", **fields})

    world.pods = [fetching_pod(0, RUNS), fetching_pod(1, RUNS)]
    total = {"total_bytes": 2000}
    world.logs = {
        f"{FIRST}/fetch-data-0": lines(
            tell("data-fetch", bytes=2000, cached_bytes=0),
            tell("data-progress", done_bytes=500, bytes_per_second=100, **total),
            tell("data-retry", reason="503", seconds=1),
        ),
        f"{SECOND}/fetch-data-0": lines(tell("data-fetch", bytes=2000, cached_bytes=1500)),
    }
    status = jobs.fetch_snapshot(cluster, "digits").status
    assert str(status.fetch) == "0.5 of 2 kB, 100 B/s"
    world.forbidden = {"/log"}
    status = jobs.fetch_snapshot(cluster, "digits").status
    assert (status.reason, status.fetch) == ("Fetching", None)


def _as_statefulset(world: World, asked: Any) -> Any:
    from tests.cli.cluster.api import Reply

    if asked.path.endswith("/statefulsets/digits") and asked.method == "GET":
        found = workload(kind="StatefulSet", replicas=2)
        found["metadata"].setdefault("annotations", {})["kdist.dev/owner"] = (
            "digits/statefulset/digits"
        )
        return Reply(document=found)
    return world(asked)


def test_a_job_that_works_or_ends_by_itself_is_left_alone(cluster: Cluster, world: World) -> None:
    assert not finalize(cluster, jobs.fetch_snapshot(cluster, "digits"))
    world.reports = {name: report("succeeded") for name in (FIRST, SECOND)}
    assert not finalize(cluster, jobs.fetch_snapshot(cluster, "digits"))
    assert world.patches == []
