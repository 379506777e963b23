"""A wait ends when the job has come so far, on every other end of it, and by its time; an outage is
no end.
"""

from __future__ import annotations

import threading

import pytest

from kdist.cluster import Cluster
from kdist.errors import Code, KdistError, NotFoundError
from kdist.job import cluster as jobs
from kdist.job.cluster import wait as waiting
from tests.cli.cluster.api import Api
from tests.cli.cluster.conftest import Connect, Serve
from tests.cli.diagnose.scenes import event
from tests.cli.job.cluster.world import FIRST, SECOND, World, changed
from tests.cli.status.objects import ended_pod, record, report, unscheduled, workload

DONE = changed(workload(), conditions=[{"type": "Complete", "status": "True"}], succeeded=2)
FAILED = changed(
    workload(),
    conditions=[{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}],
    failed=1,
)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "STATUS_INTERVAL", 0.01)


def wait(
    cluster: Cluster,
    goal: str = "done",
    timeout: float | None = 5.0,
    heard: list[str] | None = None,
) -> object:
    return jobs.wait_for(
        cluster,
        "digits",
        goal,
        timeout=timeout,
        notify=(heard if heard is not None else []).append,
    )


@pytest.mark.parametrize("goal", ["running", "first-step", "checkpoint"])
def test_a_goal_that_is_reached_ends_the_wait(cluster: Cluster, goal: str) -> None:
    assert wait(cluster, goal) is not None


def test_changes_are_reported_once_each_until_the_job_is_done(
    cluster: Cluster, world: World
) -> None:
    heard: list[str] = []
    waiting = threading.Thread(target=wait, args=(cluster, "done", 30.0, heard))
    waiting.start()
    while not heard:
        waiting.join(0.01)
    world.workload, world.pods = DONE, [ended_pod(0, 0, "Completed"), ended_pod(1, 0, "Completed")]
    waiting.join(30)
    assert heard == ["digits: Running, 2/2 nodes"]


@pytest.mark.parametrize("goal", ["done", "running", "suspended"])
def test_a_job_that_fails_ends_every_wait_with_its_cause(
    cluster: Cluster, world: World, goal: str
) -> None:
    world.workload = FAILED
    world.pods = [ended_pod(0, 70, record=record(70, "user_code", message="ValueError: bad label"))]
    with pytest.raises(KdistError, match=r"digits failed: .*ValueError: bad label") as reported:
        wait(cluster, goal)
    assert (reported.value.code, reported.value.next_command) == (
        Code.JOB_FAILED,
        "kdist why digits -n ml",
    )


def test_a_job_that_was_stopped_is_reported_from_one_that_failed(
    cluster: Cluster, world: World
) -> None:
    world.workload = FAILED
    world.pods = [ended_pod(0, 200, record=record(200, "preempted", outcome="stopped"))]
    with pytest.raises(KdistError, match="was stopped") as reported:
        wait(cluster)
    assert reported.value.code is Code.JOB_CANCELLED


def test_a_wait_that_takes_too_long_says_what_keeps_the_job(cluster: Cluster, world: World) -> None:
    world.pods = [unscheduled(0, "0/2 nodes are available: 2 Insufficient cpu.")]
    with pytest.raises(
        KdistError, match=r"digits is Pending and has not reached `done` after 0 s: digits-0-abcde"
    ) as reported:
        wait(cluster, timeout=0.1)
    assert reported.value.code is Code.TIMEOUT


def test_a_job_that_is_gone_is_what_was_waited_for_or_an_error(
    cluster: Cluster, world: World
) -> None:
    world.config_map, world.workload, world.pods = None, None, []
    assert wait(cluster, "deleted") is None
    with pytest.raises(NotFoundError):
        wait(cluster)


def test_an_api_server_that_is_away_for_a_while_is_waited_for(
    world: World, serve: Serve, connect: Connect
) -> None:
    api = Api(world)
    cluster = connect(api.url, retry_seconds=0.05)
    heard: list[str] = []
    waiting = threading.Thread(target=wait, args=(cluster, "done", 30.0, heard))
    waiting.start()
    while not heard:
        waiting.join(0.01)
    api.close()
    waiting.join(0.3)
    assert waiting.is_alive()
    world.workload = DONE
    serve(world, port=api.port)
    waiting.join(30)
    assert not waiting.is_alive()


def test_an_event_of_a_hang_does_not_end_a_wait(cluster: Cluster, world: World) -> None:
    world.events = [event("Unhealthy", "Liveness probe failed")]
    world.reports = {FIRST: report("hung"), SECOND: report("running", ranks=(1,))}
    assert wait(cluster, "running") is not None
