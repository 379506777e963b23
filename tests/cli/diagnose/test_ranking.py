"""What is wrong and keeps nothing from training now comes after what does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kdist.diagnose import diagnose
from kdist.status import Snapshot
from tests.cli.diagnose.scenes import event, scene
from tests.cli.status.objects import (
    NOW,
    Document,
    at,
    config_map,
    container,
    ended_pod,
    pod,
    record,
    report,
    terminated,
    unscheduled,
    waiting,
)

FIRST, SECOND = "digits-0-abcde", "digits-1-abcde"
STARTED = {"running": {"startedAt": at(6)}}
AWAY = event(
    "FailedCreate",
    "Error creating: Internal error occurred: failed calling webhook "
    '"mutate.example.com": failed to call webhook: Post "https://hook.kube-system.svc:443/mutate": '
    "connect: connection refused",
    kind="Job",
)


def killed_again_and_again(index: int = 1, *, ago: float = 20) -> Document:
    """A pod whose container is started again after each time that it is killed for its memory."""
    before = terminated(137, "OOMKilled", ago=ago)
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    statuses = [container(state=state, restarts=3, before=before)]
    return pod(index, phase="Running", containerStatuses=statuses)


def stuck(*pods: Document, events: tuple[Document, ...] = (), **more: Any) -> Snapshot:
    reports = {FIRST: report("rendezvous")}
    return scene(list(pods), *events, reports=reports, **more)


def test_a_webhook_that_is_away_is_no_cause_while_every_pod_exists() -> None:
    found = diagnose(stuck(pod(0), killed_again_and_again(), events=(AWAY,)))
    assert found.cause == "out-of-memory"
    assert "webhook-away" not in [each.cause for each in found.also]


def test_a_webhook_that_is_away_is_the_cause_where_a_pod_is_missing() -> None:
    found = diagnose(stuck(pod(0), ended_pod(1, 137, "OOMKilled"), events=(AWAY,)))
    assert found.cause == "webhook-away"
    assert [each.cause for each in found.also][:1] == ["out-of-memory"]


def test_a_pod_that_finds_no_node_is_the_cause_and_not_the_rendezvous_that_it_misses() -> None:
    told = record(201, "rendezvous", message="fewer than 2 nodes joined within 40 s")
    late = unscheduled(1, "0/1 nodes are available: 1 Insufficient cpu.")
    found = diagnose(scene([ended_pod(0, 201, record=told), late]))
    assert (found.cause, found.also) == ("unschedulable", ())


def test_of_pods_that_a_workload_makes_again_the_commands_are_those_that_work() -> None:
    names = (FIRST, "digits-0-bcdef")
    old = [ended_pod(0, 137, "OOMKilled", name=name) for name in names]
    new = pod(0, name="digits-0-cdefg", containerStatuses=[container(state=STARTED, ready=True)])
    new["metadata"]["creationTimestamp"] = at(8)
    found = diagnose(scene([*old, new, pod(1)], reports={}))
    assert found.cause == "out-of-memory"
    assert "were killed" in found.sentence
    assert found.commands == (
        f"kdist logs digits -n ml --pod {FIRST}",
        "kdist events digits -n ml",
    )
    assert "pod-lost" not in [each.cause for each in found.also], "what ended it is known"


def test_a_webhook_that_keeps_a_job_from_growing_comes_after_what_ails_its_pods() -> None:
    elastic = {"reported": config_map(most=4)}
    found = diagnose(stuck(pod(0), killed_again_and_again(), events=(AWAY,), **elastic))
    assert (found.cause, [each.cause for each in found.also]) == ("out-of-memory", ["webhook-away"])


def test_a_config_map_that_is_gone_comes_after_what_keeps_pods_that_have_it_from_training() -> None:
    seen = replace(stuck(pod(0), killed_again_and_again()), config_map={})
    found = diagnose(seen)
    assert (found.cause, [each.cause for each in found.also]) == (
        "out-of-memory",
        ["configmap-gone"],
    )
    new = pod(1, phase="Pending", **waiting("ContainerCreating"))
    waits = diagnose(replace(seen, pods=[pod(0), new]))
    assert waits.cause == "configmap-gone"


def test_a_volume_that_was_mounted_since_is_no_cause_of_what_its_container_does() -> None:
    slow = event("FailedMount", 'MountVolume.SetUp failed for volume "data": timeout', name=SECOND)
    ended = container(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    killed = pod(1, phase="Running", containerStatuses=[ended])
    assert diagnose(stuck(pod(0), killed, events=(slow,))).cause == "out-of-memory"


def restarted(ago: float) -> Document:
    """A pod whose container was killed for its memory, and runs again ten seconds later."""
    before = terminated(137, "OOMKilled", ago=ago)
    state = {"running": {"startedAt": at(ago - 10)}}
    again = container(state=state, ready=True, restarts=1, before=before)
    return pod(1, phase="Running", containerStatuses=[again])


@pytest.mark.parametrize(
    ("ago", "cause"), [(900, "signal"), (60, "signal"), (5, "out-of-memory"), (14, "out-of-memory")]
)
def test_memory_does_not_explain_what_was_lost_after_the_container_trained_again(
    ago: float, cause: str
) -> None:
    failure = {"cause": "signal", "message": "killed by SIGKILL", "time": NOW.timestamp() - 3}
    reports = {
        FIRST: report("restarting", last_failure=failure),
        SECOND: report("restarting", ranks=()),
    }
    assert diagnose(scene([pod(0), restarted(ago)], reports=reports)).cause == cause


@pytest.mark.parametrize(("seconds", "cause"), [(0.2, "pod-lost"), (None, "out-of-memory")])
def test_memory_does_not_explain_a_loss_that_is_not_noticed_yet_if_the_container_has_trained(
    seconds: float | None, cause: str
) -> None:
    leaving = pod(0)
    leaving["metadata"] = {**leaving["metadata"], "deletionTimestamp": at(-25)}
    saved = NOW.timestamp() - 70
    own = report("rendezvous", ranks=(1,), last_checkpoint_time=saved)
    own["ranks"][0]["step_seconds"] = seconds
    assert diagnose(scene([leaving, restarted(60)], reports={SECOND: own})).cause == cause


@pytest.mark.parametrize(("ago", "cause"), [(60, "pod-lost"), (14, "out-of-memory")])
def test_memory_does_not_explain_a_pod_that_is_taken_away_while_agents_say_that_they_train(
    ago: float, cause: str
) -> None:
    leaving = pod(0)
    leaving["metadata"] = {**leaving["metadata"], "deletionTimestamp": at(-25)}
    reports = {FIRST: report(), SECOND: report(ranks=(1,))}
    for seen in ({"reports": reports}, {"reports": {FIRST: reports[FIRST]}, "skipped": 1}):
        assert diagnose(scene([leaving, restarted(ago)], **seen)).cause == cause


@pytest.mark.parametrize(("saved", "cause"), [(20, "pod-lost"), (48, "out-of-memory")])
def test_memory_does_not_explain_a_new_group_if_the_job_was_saved_since_its_container_started(
    saved: float, cause: str
) -> None:
    new = pod(0, name="digits-0-fghij")
    new["metadata"] = {**new["metadata"], "creationTimestamp": at(10)}
    told = report("initializing", ranks=(1,), last_checkpoint_time=NOW.timestamp() - saved)
    told["ranks"][0]["step_seconds"] = None
    killing = event("Killing", "Stopping container trainer", name=FIRST, ago=15)
    found = diagnose(scene([new, restarted(60)], killing, reports={SECOND: told}))
    assert found.cause == cause


@pytest.mark.parametrize(("saved", "cause"), [(20, "pod-lost"), (85, "out-of-memory")])
def test_memory_does_not_explain_the_end_of_the_pod_that_has_trained_in_the_place_of_that_one(
    saved: float, cause: str
) -> None:
    killed = ended_pod(1, 137, "OOMKilled", ago=90)
    after = ended_pod(1, 200, name="digits-1-fghij", ago=4)
    after["metadata"] = {**after["metadata"], "creationTimestamp": at(80)}
    told = {"runId": "r1", "lastCheckpoint": {"step": 60, "time": at(saved)}}
    resource = {"metadata": {"name": "digits"}, "spec": {"nodes": 2}, "status": told}
    killing = event("Killing", "Stopping container trainer", name=FIRST, ago=12)
    assert diagnose(scene([killed, after], killing, resource=resource)).cause == cause
    # without another pod in its place, a save that began before may have ended since
    assert diagnose(scene([pod(0), killed], resource=resource)).cause == "out-of-memory"


@pytest.mark.parametrize(("ago", "cause"), [(40, "pod-lost"), (10, "out-of-memory")])
def test_memory_does_not_explain_a_pod_that_is_taken_away_while_no_agent_answers(
    ago: float, cause: str
) -> None:
    leaving = ended_pod(0, 200, ago=4)
    leaving["metadata"] = {**leaving["metadata"], "deletionTimestamp": at(-15)}
    assert diagnose(scene([leaving, restarted(ago)])).cause == cause


def test_a_pod_that_is_taken_away_is_lost_though_it_was_killed_for_its_memory_before() -> None:
    leaving = restarted(60)
    leaving["metadata"] = {**leaving["metadata"], "deletionTimestamp": at(-25)}
    found = diagnose(scene([pod(0), leaving], reports={FIRST: report("rendezvous")}))
    assert found.cause == "pod-lost"
    assert "out-of-memory" not in [each.cause for each in found.also]


@pytest.mark.parametrize("runs", [True, False])
def test_a_container_that_has_started_since_is_not_said_to_lack_its_program(runs: bool) -> None:
    before = terminated(127, "StartError", ago=60)
    state = {"running": {"startedAt": at(5)}} if runs else {"waiting": {"reason": "BackOff"}}
    statuses = [container(state=state, ready=runs, restarts=1, before=before)]
    found = diagnose(stuck(pod(0), pod(1, phase="Running", containerStatuses=statuses)))
    assert (found.cause == "container-start") is not runs


@pytest.mark.parametrize(
    ("told", "is_past"),
    [
        ({"last_checkpoint_time": 20, "last_failure": None}, True),
        ({"last_checkpoint_time": 200, "last_failure": 10}, True),
        ({"last_checkpoint_time": 200, "last_failure": None}, False),
        ({"last_checkpoint_time": 200, "last_failure": 58}, False),
    ],
)
def test_a_loss_before_all_pods_explains_nothing_once_their_group_has_saved_or_failed(
    told: dict[str, float | None], is_past: bool
) -> None:
    new = [pod(number, name=f"digits-{number}-fghij") for number in range(2)]
    for each in new:
        each["metadata"] = {**each["metadata"], "creationTimestamp": at(65)}
        each["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": at(60)}}
    known: dict[str, Any] = {
        name: None if ago is None else NOW.timestamp() - ago for name, ago in told.items()
    }
    if known["last_failure"]:
        failure = {"cause": "node_lost", "message": "", "primary": False, "rank": 1, "step": 7}
        known["last_failure"] = {**failure, "time": known["last_failure"]}
    killing = [
        event("Killing", "Stopping container trainer", name=f"digits-{number}-abcde", ago=80)
        for number in range(2)
    ]
    agents = {"digits-1-fghij": report("rendezvous", ranks=(1,), **known)}
    found = diagnose(scene(new, *killing, reports=agents))
    causes = [found.cause, *(each.cause for each in found.also)]
    assert ("pod-lost" not in causes) == is_past, causes
