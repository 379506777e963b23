"""A restart that a user has asked for is named as that, from the first pod that ends to the first
step, and what went before is not held against the new pods.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kdist.backends import WorkloadState
from kdist.diagnose import diagnose
from kdist.status import Phase, Snapshot
from tests.cli.diagnose.scenes import creating, event, scene
from tests.cli.status.objects import NOW, Document, at, config_map, pod, report

OLD, NEW = "digits-1-abcde", "digits-1-fghij"
SUSPENDED = WorkloadState(suspended=True)


def asked(seconds_ago: float = 30) -> Document:
    """The ConfigMap after `kdist restart`."""
    found = config_map()
    found["metadata"]["annotations"]["kdist.dev/started-at"] = at(seconds_ago)
    return found


def made(found: Document, seconds_ago: float) -> Document:
    found["metadata"]["creationTimestamp"] = at(seconds_ago)
    if found["status"]["phase"] == "Running":
        running = {"running": {"startedAt": at(seconds_ago - 1)}}
        found["status"]["containerStatuses"][0]["state"] = running
    return found


def deleting(index: int) -> Document:
    found = pod(index)
    found["metadata"]["deletionTimestamp"] = at(-15)
    return found


def killing(seconds_ago: float, name: str = OLD) -> Document:
    return event("Killing", "Stopping container trainer", name=name, ago=seconds_ago)


def new_pods(seconds_ago: float = 10) -> list[Document]:
    return [
        made(pod(0, name="digits-0-fghij"), seconds_ago),
        made(pod(1, name=NEW), seconds_ago),
    ]


def joining() -> dict[str, Any]:
    return {NEW: report("rendezvous", ranks=(1,)), "digits-0-fghij": report("initializing")}


RESTARTS: dict[str, Snapshot] = {
    "its pods save and end": scene(
        [deleting(0), deleting(1)], state=SUSPENDED, reported=asked(), reports={OLD: report()}
    ),
    "no pod is left, and the workload is suspended": scene([], state=SUSPENDED, reported=asked()),
    "its workload is deleted, to be made again": replace(
        scene([], state=None, reported=asked()), workload=None
    ),
    "a new pod is made": scene([creating(0), creating(1)], killing(20), reported=asked()),
    "the new pods load": scene(new_pods(), killing(20), reported=asked()),
    "the new pods meet": scene(
        new_pods(), killing(20), killing(21, "digits-0-abcde"), reported=asked(), reports=joining()
    ),
}


@pytest.mark.parametrize("name", RESTARTS)
def test_a_look_during_a_restart_says_that_it_was_asked_for(name: str) -> None:
    seen = RESTARTS[name]
    if name == "a new pod is made":
        seen = replace(seen, pods=[made(dict(each), 5) for each in seen.pods])
    found = diagnose(seen)
    assert (found.cause, found.severity) == ("start-requested", "waiting"), found
    assert found.sentence.startswith("digits starts again, as asked 30 s ago: ")
    assert found.also == ()
    assert seen.status.phase is not Phase.SUSPENDED


def test_a_pod_that_is_lost_after_the_restart_is_a_loss() -> None:
    pods = [made(pod(0, name="digits-0-fghij"), 20), made(creating(1, name="digits-1-klmno"), 3)]
    reports = {"digits-0-fghij": report("restarting")}
    found = diagnose(scene(pods, killing(5, NEW), reported=asked(60), reports=reports))
    assert found.cause == "pod-lost"
    assert f"pod {NEW} was deleted 5.0 s ago" in found.sentence


def test_what_keeps_the_new_pods_from_starting_comes_before_that_it_was_asked_for() -> None:
    pods = [made(each, 20) for each in (creating(0), creating(1))]
    trouble = event("FailedMount", 'MountVolume.SetUp failed for volume "x" : mount failed: stale')
    found = diagnose(scene(pods, trouble, reported=asked(40)))
    assert found.cause == "mount"


@pytest.mark.parametrize("seconds_ago", [600, -600])
def test_a_restart_of_ten_minutes_ago_or_of_the_future_explains_nothing(seconds_ago: int) -> None:
    found = diagnose(scene([], state=SUSPENDED, reported=asked(seconds_ago)))
    assert found.cause == "suspended"


def test_a_job_that_is_suspended_on_request_after_a_restart_is_suspended() -> None:
    reported = asked(60)
    reported["metadata"]["annotations"]["kdist.dev/asked"] = "suspended"
    assert diagnose(scene([], state=SUSPENDED, reported=reported)).cause == "suspended"


def test_a_training_job_says_it_by_its_spec() -> None:
    resource = {
        "metadata": {"name": "digits", "namespace": "ml"},
        "spec": {"restartedAt": at(30), "nodes": {"min": 2, "max": 2}},
    }
    found = diagnose(scene([deleting(0), deleting(1)], state=SUSPENDED, resource=resource))
    assert found.sentence.startswith("digits starts again, as asked 30 s ago: its pods save")


def test_pods_that_were_all_made_long_after_a_restart_are_those_of_a_later_loss() -> None:
    lost = killing(30, name="digits-0-abcde")
    later = scene(new_pods(10), killing(25), lost, reported=asked(240), reports=joining())
    assert diagnose(later).cause == "pod-lost"
    soon = scene(new_pods(120), reported=asked(240), reports=joining())
    assert diagnose(soon).cause == "start-requested"


@pytest.mark.parametrize(("saved", "is_past"), [(60, True), (130, False)])
def test_a_job_without_pods_that_has_saved_after_its_restart_lacks_them_for_another_reason(
    saved: float, is_past: bool
) -> None:
    spec = asked(150)
    told = {"lastCheckpoint": {"step": 60, "time": at(saved)}}
    resource = {"spec": {"nodes": 2, "restartedAt": at(150)}, "status": told}
    found = diagnose(scene([], reported=spec, resource=resource))
    causes = [found.cause, *(each.cause for each in found.also)]
    assert ("start-requested" not in causes) == is_past, causes


def failed(seconds_ago: float) -> Document:
    """What an agent reports of its group, which lost a node."""
    failure = {"cause": "node_lost", "message": "", "time": NOW.timestamp() - seconds_ago}
    return report("restarting", last_failure={**failure, "primary": True})


def test_a_failure_of_the_group_that_was_started_again_explains_what_comes_after_it() -> None:
    pods = [made(pod(0, name="digits-0-fghij"), 110), made(creating(1, name="digits-1-klmno"), 3)]
    reports = {"digits-0-fghij": failed(20)}
    found = diagnose(scene(pods, reported=asked(130), reports=reports))
    assert found.cause == "pod-lost"
    assert "start-requested" not in [each.cause for each in found.also]


def test_a_failure_as_the_new_pods_come_is_that_of_the_group_before() -> None:
    reports = {"digits-0-fghij": failed(105), NEW: report("rendezvous", ranks=(1,))}
    found = diagnose(scene(new_pods(110), reported=asked(130), reports=reports))
    assert found.cause == "start-requested"


def test_new_pods_whose_agents_are_long_in_loading_are_those_of_the_restart() -> None:
    silent = scene(new_pods(100), reported=asked(130), reports={})
    assert silent.status.reason == "NoAnswer"
    assert diagnose(silent).cause == "start-requested"
    assert diagnose(scene(new_pods(100), reports={})).cause == "no-answer"
