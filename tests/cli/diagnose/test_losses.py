"""During an outage the loss of a pod or a node is named, or that nothing is known: never what its
peers do, or what a pod left that was replaced.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from kdist.diagnose import Diagnosis, diagnose
from kdist.status import Snapshot
from tests.cli.diagnose.scenes import creating, event, node, nodes, scene
from tests.cli.status.objects import (
    NOW,
    Document,
    at,
    config_map,
    ended_pod,
    lost_pod,
    pod,
    record,
    report,
    workload,
)

FIRST, OLD, NEW = "digits-0-abcde", "digits-1-abcde", "digits-1-fghij"
PEERS = record(201, "node_lost", message="Connection closed by peer", primary=False, rank=0)
CONSEQUENCES = (
    "hang",
    "crash",
    "rendezvous",
    "peers-lost",
    "starting",
    "none",
    "collective-timeout",
)


def made(found: Document, seconds_ago: float) -> Document:
    found["metadata"]["creationTimestamp"] = at(seconds_ago)
    return found


def new_pod(seconds_ago: float = 10) -> Document:
    return made(creating(1, name=NEW), seconds_ago)


def deleting(index: int, **status: Any) -> Document:
    found = pod(index, **status)
    found["metadata"]["deletionTimestamp"] = at(-25)
    return found


def evicting() -> Document:
    found = deleting(1)
    found["status"]["conditions"].append(
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }
    )
    return found


def waiting(state: str = "rendezvous", **more: Any) -> dict[str, Document]:
    """The report of the survivor, whose rank has ended in phase exit and is silent since."""
    first = report(state, **more)
    first["ranks"][0] |= {"phase": "exit", "heartbeat_age": 55.0, "ended": True}
    return {FIRST: first}


def killing(seconds_ago: float = 12) -> Document:
    return event("Killing", "Stopping container trainer", name=OLD, ago=seconds_ago)


OUTAGES: dict[str, tuple[Snapshot, list[str]]] = {
    "a pod is being deleted while all train": (
        scene([pod(0), deleting(1)], reports={FIRST: report(), OLD: report(ranks=(1,))}),
        [f"pod {OLD} is being deleted", "needs 2 nodes and has 1"],
    ),
    "a drain": (
        scene([pod(0), evicting()], reports=waiting("restarting")),
        ["is being drained"],
    ),
    "a pod was deleted and its successor starts": (
        scene([pod(0), new_pod()], killing(), reports=waiting()),
        [f"pod {OLD} was deleted 12 s ago", f"{NEW} (ContainerCreating)"],
    ),
    "a pod was deleted by force and there is none yet": (
        scene([pod(0)], killing(2), reports={FIRST: report()}),
        [f"pod {OLD} was deleted", "no new pod"],
    ),
    "nothing tells what ended the pod before": (
        scene([pod(0), new_pod()], reports=waiting()),
        [f"pod {NEW} is new", "not known"],
    ),
    "a node came back, its pod is over and replaced": (
        scene([pod(0), ended_pod(1, 255, "Unknown"), new_pod()], reports=waiting()),
        [f"pod {OLD} ended with its node worker-1", NEW],
    ),
    "a node came back, and its container starts again": (
        scene(
            [
                pod(0),
                pod(
                    1,
                    containerStatuses=[
                        {
                            "name": "trainer",
                            "ready": False,
                            "restartCount": 1,
                            "state": {"running": {"startedAt": at(8)}},
                            "lastState": {
                                "terminated": {
                                    "exitCode": 255,
                                    "reason": "Unknown",
                                    "finishedAt": at(9),
                                }
                            },
                        }
                    ],
                ),
            ],
            reports=waiting(),
        ),
        [f"pod {OLD} ended with its node"],
    ),
    "a node is off, and Kubernetes has not noticed": (
        scene(
            [pod(0), pod(1, node="worker-2")],
            reports=waiting(peers={"heard": [], "silent": ["10.0.0.2"], "age_seconds": 1.0}),
        ),
        [f"pod {OLD} on node worker-2 does not answer"],
    ),
    "a node is off": (
        scene(
            [pod(0), lost_pod(1)],
            nodes=nodes(node("worker-2", ready="Unknown")),
            reports=waiting(),
        ),
        ["node worker-2 does not answer"],
    ),
    "a pod was evicted and is replaced": (
        scene(
            [
                pod(0),
                pod(1, phase="Failed", reason="Evicted", message="low on memory"),
                new_pod(),
            ],
            killing(15),
            reports=waiting(),
        ),
        [f"pod {OLD} was deleted"],
    ),
    "the pod that was replaced left the record of a peer": (
        scene([pod(0), ended_pod(1, 201, record=PEERS), new_pod()], killing(), reports=waiting()),
        [f"pod {OLD} was deleted"],
    ),
}


@pytest.mark.parametrize("name", OUTAGES)
def test_a_look_during_an_outage_names_the_event(name: str) -> None:
    seen, words = OUTAGES[name]
    found = diagnose(seen)
    assert found.cause in ("pod-lost", "node-lost", "evicted"), found.sentence
    told = " ".join([found.sentence, *found.evidence])
    assert [word for word in words if word not in told] == [], told
    assert [each.cause for each in found.also if each.cause in CONSEQUENCES] == []
    assert "phase exit" not in told
    assert "the image must start" not in found.fix


def test_a_pod_that_its_lost_node_ends_when_it_is_back_was_deleted_for_that_node() -> None:
    tainted = event("TaintManagerEviction", "Marking for deletion Pod", name=OLD, ago=60)
    why = ": its node was tainted or stopped responding"
    lost = diagnose(scene([pod(0), new_pod()], killing(12), tainted, reports=waiting()))
    assert lost.sentence.startswith(f"pod {OLD} was deleted 12 s ago{why}; in its place: {NEW}")
    again = event("Scheduled", "assigned", name=OLD, ago=40)
    later = scene([pod(0), new_pod()], killing(12), again, tainted, reports=waiting())
    assert why not in diagnose(later).sentence


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_pod_that_was_given_up_for_its_node_comes_before_those_that_were_ended_with_it(
    cancelled: bool,
) -> None:
    given_up = [event("NodeNotReady", "Node is not ready", name=OLD, ago=20)]
    if cancelled:
        message = "Cancelling deletion of Pod ml/digits-1-abcde"
        given_up.insert(0, event("TaintManagerEviction", message, name=OLD, ago=16))
    other = event("Killing", "Stopping container trainer", name="digits-0-00000", ago=18)
    pods = [started(pod(0), 5), started(pod(1, name=NEW), 5)]
    found = diagnose(scene(pods, other, *given_up))
    assert re.match(
        rf"pod {OLD} was deleted \d+ s ago: its node was tainted or stopped responding; "
        "pod digits-0-00000 was deleted 18 s ago; in its place",
        found.sentence,
    ), found.sentence


def test_a_job_whose_pod_its_controller_is_long_in_replacing_is_told_why() -> None:
    lost = scene([pod(0)], killing(100), reports=waiting())
    assert "up to 10 min" in diagnose(lost).fix
    assert "kdist restart digits -n ml" in diagnose(lost).fix
    starting = scene([pod(0), new_pod()], killing(100), reports=waiting())
    assert "10 min" not in diagnose(starting).fix
    whole = replace(lost, config_map=config_map(backend="statefulset"))
    assert "10 min" not in diagnose(whole).fix


def test_a_new_pod_of_the_same_name_whose_agent_loads_is_in_the_place_of_the_lost_one() -> None:
    new = started(pod(1), 8)
    found = diagnose(scene([pod(0), new], killing(12), reports=waiting()))
    assert found.sentence.startswith(f"pod {OLD} was deleted 12 s ago; in its place: {OLD} (Run")
    old = started(pod(1), 300)
    assert "no new pod" in diagnose(scene([pod(0), old], killing(12), reports=waiting())).sentence


def test_a_rank_that_has_ended_is_no_evidence_of_a_hang_by_an_agent_of_any_version() -> None:
    for told in ({"ended": True}, {}):
        first = report()
        first["ranks"][0] |= {"phase": "exit", "heartbeat_age": 55.0, **told}
        reports = {FIRST: first, OLD: report(ranks=(1,))}
        assert diagnose(scene([pod(0), pod(1)], reports=reports)).cause != "hang"


def failed_again(cause: str, **more: Any) -> Diagnosis:
    """The job of which a pod was replaced, and which a failure ended again after that."""
    failure = {"cause": cause, "rank": 0, "message": "killed by SIGKILL", "primary": True, **more}
    reports = waiting("restarting", last_failure={"time": NOW.timestamp() - 3, **failure})
    seen = scene([pod(0), ended_pod(1, 255, "Unknown"), new_pod()], reports=reports)
    return diagnose(seen)


def test_a_later_failure_of_its_own_comes_before_an_earlier_loss() -> None:
    found = failed_again("signal")
    assert (found.cause, found.severity) == ("signal", "waiting")
    assert found.sentence.startswith("rank 0 failed: signal: killed by SIGKILL (3.0 s ago)")
    assert failed_again("node_lost", primary=False).cause == "pod-lost"


def test_a_restart_whose_peers_were_lost_for_an_unknown_reason_says_that_it_is_not_known() -> None:
    failure = {"cause": "node_lost", "rank": 0, "primary": False, "time": NOW.timestamp() - 3}
    reports = waiting("restarting", last_failure=failure) | {OLD: report("restarting", ranks=(1,))}
    found = diagnose(scene([pod(0), pod(1)], reports=reports))
    assert found.cause == "peers-lost"
    assert "which pod or node was lost is not known" in found.sentence


def test_a_loss_of_an_hour_ago_explains_nothing() -> None:
    over = made(ended_pod(1, 255, "Unknown", ago=3600), 7200)
    running = made(pod(1, name=NEW), 3500)
    reports = waiting("restarting") | {NEW: report("restarting", ranks=(1,))}
    found = diagnose(scene([pod(0), over, running], reports=reports))
    assert found.cause == "starting"


def started(found: Document, seconds_ago: float) -> Document:
    """The running pod, made so many seconds ago."""
    made(found, seconds_ago)["status"]["containerStatuses"][0]["state"] = {
        "running": {"startedAt": at(seconds_ago - 1)}
    }
    return found


def test_only_the_present_loss_is_named_where_an_earlier_one_was_made_good() -> None:
    first = event("Killing", "Stopping container trainer", name="digits-0-00000", ago=84)
    pods = [started(pod(0), 80), started(pod(1, name=NEW), 10)]
    reports = waiting("restarting") | {NEW: report("rendezvous", ranks=(1,))}
    found = diagnose(scene(pods, killing(18), first, reports=reports))
    assert found.sentence.startswith(f"pod {OLD} was deleted 18 s ago; in its place: {NEW}")
    assert "digits-0-00000" not in str(found.to_document())


def test_where_one_lost_pod_has_all_made_again_the_first_one_is_named_first() -> None:
    second = event("Killing", "Stopping container trainer", name="digits-0-00000", ago=31)
    pods = [started(pod(0), 20), started(pod(1, name=NEW), 20)]
    restarts = event("RestartJobSetAndIgnoreMaxRestartsFailurePolicyAction", "", kind="JobSet")
    found = diagnose(scene(pods, killing(35), second, restarts))
    assert found.cause == "pod-lost"
    assert found.sentence.startswith(f"pod {OLD} was deleted 35 s ago; pod digits-0-00000")
    assert found.also == ()


def test_a_pod_that_was_given_up_with_its_node_is_named_before_those_that_its_jobset_ends() -> None:
    given_up = pod(0, phase="Failed", reason="NodeLost")
    found = diagnose(scene([given_up], killing(4)))
    assert found.cause == "pod-lost"
    assert found.sentence.startswith(f"pod {FIRST} ended with its node")
    assert f"pod {OLD} was deleted 4.0 s ago" in found.sentence


def test_the_pods_of_a_job_that_was_deleted_and_sent_again_are_no_loss() -> None:
    pods = [started(pod(0), 10), started(pod(1, name=NEW), 10)]
    found = diagnose(scene(pods, killing(30), over=workload(age=15)))
    assert found.cause == "starting"


LATE = (
    'job "digits-node-0" creation failed: admission webhook "mjob.kb.io" denied the request: '
    'JobSet.jobset.x-k8s.io "digits" not found'
)


@pytest.mark.parametrize("reason", ["JobCreationFailed", "TrainJobResourcesCreationFailed"])
def test_a_webhook_that_has_not_heard_yet_of_what_was_just_made_is_no_cause(reason: str) -> None:
    late = event(reason, LATE, kind="JobSet", ago=3)
    assert diagnose(scene([], late, over=workload(age=4))).cause == "starting"
    lost = scene([pod(0)], late, killing(12), reports=waiting())
    assert diagnose(lost).cause == "pod-lost"
    for_ever = event(reason, LATE, kind="JobSet", ago=3, count=20)
    assert diagnose(scene([], for_ever)).cause in ("webhook-refused", "warning")


def test_a_warning_of_before_all_pods_were_made_is_of_the_past() -> None:
    pods = [started(pod(0), 10), started(pod(1), 10)]
    warns = event("SyncFailed", "cannot create the service", kind="JobSet", ago=20)
    assert diagnose(scene(pods, warns)).cause == "starting"
    assert diagnose(scene(pods[:1], warns)).cause == "warning"


ABSENT = 'MountVolume.SetUp failed for volume "config" : configmap "digits-train-1" not found'


def test_a_config_map_that_is_there_again_is_no_cause() -> None:
    pods = [pod(0), new_pod()]
    absent = event("FailedMount", ABSENT, name=NEW, ago=9)
    seen = scene(pods, killing(), absent, reports=waiting())
    assert diagnose(seen).cause == "mount"
    assert diagnose(replace(seen, config_maps={"digits-train-1"})).cause == "pod-lost"
    unheard = event("FailedMount", 'object "ml"/"digits-train-1" not registered', name=NEW)
    assert diagnose(scene(pods, killing(), unheard, reports=waiting())).cause == "pod-lost"


UNSYNCED = [
    'MountVolume.SetUp failed for volume "config" : failed to sync configmap cache: timed out '
    "waiting for the condition",
    "Unable to attach or mount volumes: unmounted volumes=[checkpoints token], unattached "
    "volumes=[], failed to process volumes=[checkpoints]: error processing PVC ml/ckpt: failed to "
    'fetch PVC from API server: persistentvolumeclaims "ckpt" is forbidden: User '
    '"system:node:worker-1" cannot get resource "persistentvolumeclaims" in API group "" in the '
    "namespace \"ml\": no relationship found between node 'worker-1' and this object",
]


@pytest.mark.parametrize("message", UNSYNCED)
def test_a_kubelet_that_has_not_heard_yet_of_a_new_pods_objects_is_no_cause(message: str) -> None:
    pods = [pod(0), new_pod()]
    late = event("FailedMount", message, name=NEW, ago=3)
    lost = scene(pods, killing(), late, reports=waiting())
    assert diagnose(lost).cause == "pod-lost"
    again = diagnose(scene([creating(), creating(1, name=NEW)], late, over=workload(age=4)))
    assert again.cause == "starting"
    for_ever = event("FailedMount", message, name=NEW, ago=3, count=20)
    assert diagnose(scene(pods, killing(), for_ever, reports=waiting())).cause == "mount"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"script": {"path": "train.py"}}, "if it has not, the job ends"),
        ({"script": {"path": "train.py"}, "maxRestarts": 3}, "else it starts from its beginning"),
        ({"train": {}}, "from what the others have kept, or from its last checkpoint"),
    ],
)
def test_what_follows_a_loss_is_said_as_it_holds_for_a_script(
    spec: dict[str, Any], words: str
) -> None:
    job = {"kind": "TrainingJob", "spec": {"nodes": {"min": 2, "max": 2}, **spec}}
    reported = config_map()
    reported["data"]["job.json"] = json.dumps(job)
    first = report("rendezvous", last_checkpoint_step=None)
    seen = scene([pod(0)], killing(), reported=reported, reports={FIRST: first})
    assert words in diagnose(seen).fix
