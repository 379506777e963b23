"""When agents are asked, that hostile ones hold up nobody else, and when a job that does not
progress is diagnosed.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kdist.agents.client import STATUS_BYTES, PodTransport
from kdist.cluster import Cluster
from kdist.diagnose import Diagnosis, diagnose
from kdist.manifest import ObjectKey
from kdist.status import documents, read_pod
from kdist_controller import agent_poller
from kdist_controller.agent_poller import (
    INTERVAL_SECONDS,
    REFUSED_SECONDS,
    STUCK_SECONDS,
    AgentPoller,
    Inquiry,
    _KnownAgents,
    _Turn,
)
from kdist_controller.metrics import Metrics
from kdist_controller.observation import Observed
from kdist_controller.resource import JobKey, Resource
from tests import hostile, patience
from tests.cli.diagnose.scenes import creating, scene
from tests.cli.status.objects import NOW, at, config_map, pod, report, workload

HOSTILE_PODS = 50
GREEDY_BYTES = 40 << 20
"""Sixteen answers at a time are 22 MB while they are parsed; all fifty, if they were kept, 70."""
GOOD = {"state": "running", "generation": 1, "ranks": [{"rank": 0, "step": 7}]}


class Crowd:
    """Pods on this machine, each with the server of an agent, and the poller that asks them."""

    def __init__(self, connection: Cluster) -> None:
        self._stack = ExitStack()
        self._ports: dict[str, int] = {}
        metrics = Metrics(list, lambda: 0, lambda: 0, list)
        self.poller = AgentPoller(connection, self._route, metrics=metrics, notify=lambda _: None)

    def _route(self, namespace: str, pod: documents.Document) -> PodTransport:
        return PodTransport("127.0.0.1", self._ports[f"{namespace}/{documents.name(pod)}"])

    def run(self, key: JobKey, behaviours: Sequence[hostile.Behaviour]) -> None:
        """Start a job with a pod for each behaviour."""
        pods: list[dict[str, Any]] = []
        for number, behaviour in enumerate(behaviours):
            server = self._stack.enter_context(hostile.serve(behaviour))
            self._ports[f"{key.namespace}/{key.name}-{number}"] = server.port
            running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            container = {"name": "trainer", "state": running}
            status = {"phase": "Running", "containerStatuses": [container]}
            pods.append({"metadata": {"name": f"{key.name}-{number}"}, "status": status})
        metadata = {"namespace": key.namespace, "name": key.name, "uid": key.name}
        self.poller.plan(Observed(Resource({"metadata": metadata}), pods=pods), poll_now=False)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def crowd(connection: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    monkeypatch.setattr(agent_poller, "_FIRST_SECONDS", 0.01)
    made = Crowd(connection)
    yield made
    made.close()


def diagnoses(inquiry: Inquiry, seconds: int) -> list[int]:
    """Moments at which a job that is looked at once a second needs a diagnosis, and gets it."""
    found = []
    for now in range(1000, 1000 + seconds):
        if inquiry.needs_diagnosis(now):
            inquiry.diagnosed(None, now)
            found.append(now - 1000)
    return found


def test_a_job_that_does_not_progress_is_diagnosed_less_and_less_often() -> None:
    found = diagnoses(Inquiry(stuck=True), 3600)
    pauses = [after - before for before, after in pairwise(found)]
    assert found[0] == 0
    assert pauses == sorted(pauses)
    assert len([each for each in found if each < INTERVAL_SECONDS]) > 2
    assert pauses[-1] == STUCK_SECONDS


def test_a_job_that_progresses_is_not_diagnosed() -> None:
    assert diagnoses(Inquiry(), 3600) == []


def test_a_diagnosis_is_of_the_time_in_which_the_job_does_not_progress() -> None:
    found = Inquiry(stuck=True)
    lost = Diagnosis("pod-lost", "pod digits-1 was deleted")
    found.diagnosed(lost, 1000.0)
    found.set_stuck(stuck=True)
    known = [found.diagnosis]
    for stuck in (False, True):
        found.set_stuck(stuck=stuck)
        known.append(found.diagnosis)
    assert known == [lost, lost, None]
    assert found.needs_diagnosis(1000.5)


def test_an_agent_that_was_not_asked_is_not_called_silent(connection: Cluster) -> None:
    pods = [pod(0), pod(1)]
    first, second = map(documents.name, pods)
    agents = [read_pod(each) for each in pods]
    for turn, skipped in (
        (_Turn({first: report("rendezvous")}), 1),
        (_Turn({first: report("rendezvous")}, silent=[second]), 0),
    ):
        known = _KnownAgents(connection, namespace="ml", turn=turn)
        assert list(known.poll(agents)) == [first]
        assert known.skipped == skipped
    metadata = {"namespace": "ml", "name": "digits", "uid": "1"}
    resource = Resource({"metadata": metadata})
    observed = Observed(resource, pods=pods, reports={first: report("rendezvous")})
    assert observed.snapshot.skipped == 1
    assert replace(observed, silent=[second]).snapshot.skipped == 0
    assert replace(observed, pods=[pods[0], creating(1)]).snapshot.skipped == 0
    seen = scene(pods, reports={first: report("rendezvous")}, skipped=1)
    assert diagnose(seen).cause == "rendezvous"
    assert diagnose(replace(seen, skipped=0)).cause == "pod-lost"


@pytest.mark.parametrize(
    ("refused", "turns", "longest"),
    [
        (True, 12, REFUSED_SECONDS),
        (True, 48, INTERVAL_SECONDS),  # nobody brings back what it lacks
        (False, 12, INTERVAL_SECONDS),
    ],
)
def test_an_agent_that_is_refused_the_rendezvous_is_asked_again_soon_for_a_while(
    crowd: Crowd, *, refused: bool, turns: int, longest: float
) -> None:
    key = JobKey("ml", "digits")
    answer = json.dumps({**GOOD, "rendezvous_refused": refused}).encode()
    crowd.run(key, [hostile.answer(answer)])
    for _ in range(turns):  # the pause doubles up to its longest
        crowd.poller._inquire(key)
    assert crowd.poller._inquiries[key].pause == longest


def test_a_config_map_that_the_controller_sees_is_not_called_deleted() -> None:
    refused = report(
        rendezvous_refused=True, rendezvous_refusal="404: the API server does not have"
    )
    pods = [pod(0), pod(1)]
    found = Observed(
        Resource({"metadata": {"namespace": "ml", "name": "digits", "uid": "1"}}),
        config_map=config_map(),
        workload=workload(),
        pods=pods,
        reports={documents.name(pods[0]): refused, documents.name(pods[1]): report(ranks=(1,))},
        now=NOW.timestamp(),
    )
    assert diagnose(found.snapshot).cause == "account-gone"
    key = ObjectKey("v1", "ConfigMap", "digits-rendezvous")
    assert diagnose(replace(found, children={key: {}}).snapshot).cause == "none"


def test_an_agent_that_is_silent_while_another_answers_is_not_quoted_any_more(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = JobKey("ml", "digits")
    good = hostile.answer(json.dumps(GOOD).encode())
    crowd.run(key, [good, good])
    first, second = "digits-0", "digits-1"
    turns = [
        _Turn({first: GOOD}),
        _Turn({}, silent=[first, second]),
        _Turn({second: GOOD}, silent=[first]),
    ]
    known = []
    for turn in turns:
        monkeypatch.setattr(crowd.poller, "_ask", lambda *_, turn=turn, **__: turn)
        crowd.poller._inquire(key)
        known.append(set(crowd.poller.answers(key)))
    assert known == [{first}, {first}, {second}]


def restarted(seconds_ago: float | None) -> Observed:
    """A TrainingJob that was told so long ago to start again, and has no workload at the moment."""
    spec = {} if seconds_ago is None else {"restartedAt": at(seconds_ago)}
    metadata = {"namespace": "ml", "name": "digits", "uid": "1"}
    resource = Resource({"metadata": metadata, "spec": spec})
    return Observed(resource, config_map=config_map(), now=NOW.timestamp())


def test_a_job_that_was_told_to_start_again_is_not_said_to_have_no_workload() -> None:
    found = diagnose(restarted(20).explained)
    assert (found.cause, found.severity) == ("start-requested", "waiting")
    for moment in (None, 3600):
        assert diagnose(restarted(moment).explained).cause == "no-workload"


def test_the_poller_diagnoses_a_job_as_one_that_was_told_to_start_again(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, seen = JobKey("ml", "digits"), scene([creating(0), creating(1)], over=workload(age=1))
    monkeypatch.setattr(agent_poller, "fetch_snapshot", lambda *_, **__: seen)
    found = [
        crowd.poller._diagnose(key, _Turn(), {"spec": {"restartedAt": asked}})
        for asked in ("", at(20))
    ]
    assert [each.cause for each in found if each] == ["starting", "start-requested"]


@pytest.mark.parametrize("behaviour", [hostile.drip_headers, hostile.stay_silent])
@pytest.mark.parametrize("jobs", [1, HOSTILE_PODS])
def test_hostile_pods_of_one_namespace_hold_up_no_job_of_another(
    crowd: Crowd, behaviour: hostile.Behaviour, jobs: int
) -> None:
    for number in range(jobs):
        crowd.run(JobKey("hostile", f"slow-{number}"), [behaviour] * (HOSTILE_PODS // jobs))
    crowd.poller.start()
    assert patience.soon(lambda: len(crowd.poller._queue) >= jobs - agent_poller._SHARE)
    honest = JobKey("ml", "digits")
    crowd.run(honest, [hostile.answer(json.dumps(GOOD).encode())])
    assert patience.soon(lambda: crowd.poller.answers(honest), 5.0)
    assert crowd.poller.answers(honest)["digits-0"]["ranks"] == GOOD["ranks"]


def test_an_agent_that_answers_is_asked_before_those_that_were_silent(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_poller, "_TIMEOUT", 0.1)
    monkeypatch.setattr(agent_poller, "_TURN_SECONDS", 0.15)  # two silent agents
    mixed = JobKey("ml", "mixed")
    good = hostile.answer(json.dumps(GOOD).encode())
    crowd.run(mixed, [*[hostile.stay_silent] * 6, good])
    crowd.poller.start()
    assert patience.soon(lambda: crowd.poller.answers(mixed), 10.0)
    before = time.monotonic()
    at = crowd.poller._inquiries[mixed].answers["mixed-6"][0]
    crowd.poller._queue.add(mixed)
    found = crowd.poller._inquiries[mixed]
    assert patience.soon(lambda: found.answers["mixed-6"][0] > at, 10.0)
    assert before < found.answers["mixed-6"][0]


def resident_bytes() -> int:
    """Memory of this process, which is that of the poller and of the pods' servers."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def greedy_bodies() -> list[bytes]:
    """Answers of the largest size that is read: one that is large when it is parsed, and one that
    is all kept.
    """
    nested = b'{"state": "running", "ranks": [' + b"[]," * (STATUS_BYTES // 3 - 20) + b"[]]}"
    rank = {"rank": 1, "phase": "x" * 64, "collective": "y" * 256}
    kept = {"state": "running", "ranks": [rank] * 256, "exit": {"message": "\u2028" * 4096}}
    kept |= {"peers": {"heard": ["10.0.0.1"] * 4096, "age_seconds": 1}}
    return [nested, json.dumps(kept).encode()]


@pytest.mark.sampled
def test_answers_of_hostile_pods_take_little_memory(crowd: Crowd) -> None:
    bodies = greedy_bodies()
    assert all(STATUS_BYTES // 2 < len(each) <= STATUS_BYTES for each in bodies)
    key = JobKey("hostile", "greedy")
    behaviours = [hostile.answer(bodies[number % 2]) for number in range(HOSTILE_PODS)]
    behaviours[::10] = [hostile.send_much] * len(behaviours[::10])
    crowd.run(key, behaviours)
    crowd.poller._inquiries[key].everyone = True
    before = resident_bytes()
    crowd.poller.start()
    expected = HOSTILE_PODS - len(behaviours[::10])
    assert patience.soon(lambda: len(crowd.poller.answers(key)) == expected, 30.0)
    assert resident_bytes() - before < GREEDY_BYTES
