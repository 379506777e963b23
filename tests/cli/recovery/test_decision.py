"""A pod is given up on enough evidence that its node is gone, and whatever speaks against it makes
kdist wait and say why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kdist.recovery import PodDecision, decide
from kdist.recovery.decision import NodeState, RecoveryContext, Storage, read_nodes
from tests.cli.recovery.situations import (
    FIRST,
    SECOND,
    SHARED,
    TIME,
    agent,
    gone,
    node,
    owned,
    situation,
)
from tests.cli.status.objects import Document, at, lost_pod, pod

OFF = frozenset({"worker-2"})
HIDDEN: dict[str, Any] = {
    "nodes": {},
    "unreadable": "you may not read them",
    "pods": [owned(pod(0)), owned(lost_pod(1))],
}
SINGLE, NONE = Storage("single", claim="ckpt"), Storage("none")
FREE = Storage("shared", fenced=False, claim="ckpt")
LONG = gone(since=60, renewed=110)
PINNED = replace(SHARED, pinned={"ckpt": "worker-2"})


def decided(seen: RecoveryContext) -> PodDecision:
    (found,) = decide(seen)
    assert (found.pod, found.uid, found.node) == (SECOND, "uid-1", "worker-2")
    return found


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (situation(), "1 agent of the job no longer hears its agent"),
        (situation(storage=NONE), "no longer hears"),
        (situation(storage=SINGLE), "no longer hears"),
        (situation(LONG, reports={}), "the lock of the checkpoints keeps it from writing"),
        (
            situation(LONG, reports=agent(FIRST, age=60)),
            "the lock of the checkpoints keeps it from writing",
        ),
        (situation(storage=NONE, reports={}, switched_off=OFF), "is said to be switched off"),
        (situation(gone(renewed=20), switched_off=OFF), "is said to be switched off"),
        (
            situation(gone(ready="True", renewed=30), switched_off=OFF),
            "is said to be switched off",
        ),
        (
            situation(**HIDDEN, switched_off=OFF),
            "is said to be switched off",
        ),
    ],
)
def test_a_pod_is_given_up_on_the_testimony_of_others_on_fenced_storage_or_on_a_word(
    seen: RecoveryContext, words: str
) -> None:
    found = decided(seen)
    assert found.recover, found.message
    assert words in found.message
    assert found.retry_seconds is None


@pytest.mark.parametrize(
    ("seen", "reason", "words"),
    [
        (situation(gone(ready="False")), "KubeletAnswers", "the kubelet of node worker-2 answers"),
        (situation(gone(ready="True", renewed=30)), "LeaseLate", "is late to renew its Lease"),
        (situation(gone(renewed=20)), "LeaseHeld", "has not run out yet"),
        (situation(replace(gone(), renewed=None)), "NoLease", "has no Lease"),
        (situation(now=TIME + 30), "Stale", "is 30 s old: it may have returned"),
        (
            situation(reports={**agent(FIRST), **agent(SECOND)}),
            "AgentAnswers",
            f"the agent of {SECOND} answers",
        ),
        (
            situation(reports=agent(FIRST, heard=("10.0.0.1", "10.0.0.2"))),
            "AgentHeard",
            f"the agent of {FIRST} hears that of {SECOND}",
        ),
        (situation(reports={}), "NoObserver", "kdist waits 40 s longer"),
        (
            situation(gone(since=10, renewed=300), reports={}),
            "NoObserver",
            "kdist waits 40 s longer",
        ),
        (situation(LONG, reports={}, storage=SINGLE), "NotFenced", "by one node only"),
        (situation(LONG, reports={}, storage=NONE), "NotFenced", "the job has no checkpoints"),
        (situation(LONG, reports={}, storage=FREE), "NotFenced", "a script may write"),
        (
            situation(LONG, reports={}, storage=Storage("unknown", claim="ckpt")),
            "NotFenced",
            "claim ckpt cannot be read",
        ),
        (situation(storage=PINNED), "VolumeOnNode", "only the node's return helps"),
        (situation(owners=frozenset({"another"})), "NotOwned", "was not created for job digits"),
        (situation(**HIDDEN), "Unreadable", "may not read"),
    ],
)
def test_a_pod_is_kept_as_long_as_something_is_missing_or_speaks_against_it(
    seen: RecoveryContext, reason: str, words: str
) -> None:
    found = decided(seen)
    assert (found.recover, found.reason) == (False, reason)
    assert words in found.message


def test_nothing_is_given_up_when_most_nodes_fall_silent_at_once() -> None:
    silent = [node(f"worker-{number}", ready="Unknown", renewed=60) for number in range(2, 5)]
    found = decided(situation(*silent))
    assert (found.recover, found.reason) == (False, "ManyNodes")
    assert found.message.startswith("3 of 5 nodes are unknown")


def test_nothing_is_given_up_when_kubelets_are_only_now_renewing_their_leases_again() -> None:
    late = [replace(node(f"worker-{number}"), renewed=TIME - 60) for number in range(3, 6)]
    found = decided(situation(gone(), *late))
    assert (found.recover, found.reason) == (False, "ManyNodes")
    assert found.message.startswith("4 of 6 nodes have not renewed their Leases")


def test_a_clock_of_this_machine_that_is_wrong_by_a_day_changes_nothing() -> None:
    for off in (-86_400.0, 86_400.0):
        assert decided(situation(read_at=TIME + off, now=TIME + off)).recover


@pytest.mark.parametrize("state", ["True", "False"])
def test_a_word_does_not_stand_against_a_kubelet_that_answers(state: str) -> None:
    found = decided(situation(gone(ready=state, renewed=8), switched_off=OFF))
    assert not found.recover
    assert "answers" in found.message


@pytest.mark.parametrize(
    "reports", [agent(SECOND), agent(FIRST, heard=("10.0.0.2",))], ids=["answers", "heard"]
)
def test_a_word_does_not_stand_against_an_agent_that_lives(reports: Any) -> None:
    assert not decided(situation(reports=reports, switched_off=OFF)).recover


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_needs_no_decision(phase: str) -> None:
    pods = [owned(pod(0)), owned(pod(1, node="worker-2", phase=phase))]
    assert decide(situation(pods=pods)) == []


def test_pods_on_nodes_that_answer_and_pods_without_a_node_need_no_decision() -> None:
    waiting = owned(pod(2, node=None, phase="Pending"))
    seen = situation()
    assert [each.pod for each in decide(replace(seen, pods=[*seen.pods, waiting]))] == [SECOND]
    assert decide(situation(node("worker-2", renewed=10))) == []


def test_an_agent_on_another_node_that_is_gone_testifies_nothing() -> None:
    cut = NodeState("worker-1", "Unknown", TIME - 15, "", TIME - 60)
    far = [node(f"worker-{number}") for number in range(3, 6)]
    found = decide(situation(gone(), *far, nodes={n.name: n for n in (gone(), cut, *far)}))
    assert {each.reason for each in found} == {"AgentAnswers", "NoObserver"}


def test_a_deleted_node_is_left_to_kubernetes() -> None:
    found = decided(situation(nodes={"worker-1": node("worker-1")}))
    assert (found.recover, found.reason) == (False, "NodeDeleted")


def test_a_wait_that_ends_by_itself_says_when_to_look_again() -> None:
    assert decided(situation(gone(renewed=25))).retry_seconds == pytest.approx(15)
    assert decided(situation(reports={})).retry_seconds == pytest.approx(25)
    assert decided(situation(reports={}, storage=NONE)).retry_seconds is None


def test_the_evidence_shows_the_node_its_lease_and_every_witness() -> None:
    assert decided(situation()).evidence == (
        "node/worker-2: Ready is Unknown for 15 s",
        "lease/worker-2: renewed 1:00 before the newest Lease, for 40 s: it ran out 20 s ago",
        f"pod/{FIRST}: its agent does not hear that of {SECOND}, as of 0.5 s ago",
    )


def test_nodes_are_read_with_the_leases_of_their_names() -> None:
    ready = {"type": "Ready", "status": "Unknown", "lastTransitionTime": at(9), "message": "gone"}
    nodes: list[Document] = [
        {"metadata": {"name": "a"}, "status": {"conditions": [ready]}},
        {"metadata": {"name": "b"}, "status": {}},
    ]
    renewed = at(50).replace("Z", ".500000Z")
    spec = {"renewTime": renewed, "leaseDurationSeconds": 20, "holderIdentity": "a"}
    found = read_nodes(nodes, [{"metadata": {"name": "a"}, "spec": spec}, {"metadata": {}}])
    assert found["a"] == NodeState("a", "Unknown", TIME - 9, "gone", TIME - 49.5, 20.0)
    assert found["b"] == NodeState("b", "Unknown")
