"""Which faults a job would survive, by what is known of it."""

from __future__ import annotations

from typing import Any

import pytest

from kdist.drill import faults
from kdist.drill.drill import plan_fault
from kdist.drill.faults import FAULTS, Fault, Situation
from kdist.errors import KdistError, NotFoundError, UsageError
from kdist_trainer.rendezvous.state import RendezvousTimings

CONFIG: dict[str, Any] = {
    "nodes": {"min": 2, "max": 2},
    "maxRestarts": 10,
    "hangTimeoutSeconds": 300,
    "train": {"strategy": "ddp", "collectiveTiming": "on"},
    "script": None,
}
FATAL: tuple[Fault, ...] = ("rank", "agent", "pod", "silence")


def status(node: int, **fields: Any) -> dict[str, Any]:
    """The `/status` of an agent with one rank."""
    rank = {"rank": node, "local_rank": 0, "step": 31, "step_seconds": 0.02}
    return {
        "state": "running",
        "generation": 3,
        "world_size": 2,
        "restarts_remaining": 10,
        "last_checkpoint_step": None if node else 20,
        "ranks": [rank],
        "pid": 100 + node,
        **fields,
    }


def situation(**fields: Any) -> Situation:
    """A job of two nodes that trains and has saved step 20."""
    common: dict[str, Any] = {
        "name": "digits",
        "place": "local",
        "config": CONFIG,
        "nodes": ("node-0", "node-1"),
        "documents": {"node-0": status(0), "node-1": status(1)},
        "check": "kdist status digits",
    }
    return Situation(**{**common, **fields})


def reports(**fields: Any) -> dict[str, Any]:
    return {"documents": {f"node-{node}": status(node, **fields) for node in (0, 1)}}


def test_a_job_that_trains_and_has_saved_survives_what_ends_its_ranks() -> None:
    found = {fault: faults.why_refused(fault, situation()) for fault in FAULTS}
    assert [fault for fault, obstacle in found.items() if obstacle] == []
    assert faults.describe_risk(situation()) == ("at most 11 steps (since step 20), and a restart")


@pytest.mark.parametrize("fault", FATAL)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"has_checkpoints": False}, "keeps no checkpoints"),
        (reports(last_checkpoint_step=None), "no checkpoint yet, so all 31 steps"),
        (reports(ranks=[]), "has not finished a step"),
        (reports(restarts_remaining=1), "only 1 restart of maxRestarts: 10 is left"),
        (reports(restarts_remaining=None), "do not say how many restarts are left"),
        (reports(state="rendezvous"), "not training now (rendezvous)"),
        ({"documents": {}}, "none of its agents answers"),
        ({"inactive": "it is suspended"}, "it is suspended"),
        ({"drill": "rank (pid 7)"}, "another drill is in progress: rank (pid 7)"),
        ({"forbidden": dict.fromkeys(FATAL, "create pods/exec")}, "you may not create pods/exec"),
    ],
)
def test_a_fault_that_the_job_would_not_survive_is_refused_with_the_reason(
    fault: Fault, fields: dict[str, Any], reason: str
) -> None:
    found = situation(**fields)
    assert reason in faults.why_refused(fault, found)
    with pytest.raises(KdistError) as refused:
        plan_fault(found, fault)
    assert reason in refused.value.message
    assert refused.value.next_command == "kdist status digits"


def test_a_checkpoint_of_an_earlier_group_counts() -> None:
    found = situation(**reports(last_checkpoint_step=None), saved=30)
    assert faults.why_refused("rank", found) == ""
    assert found.committed == 30


def test_a_node_that_could_not_come_back_is_left_alone() -> None:
    found = situation(place="cluster", unreturnable={"node-1": "every node is cordoned"})
    for fault in ("agent", "pod"):
        assert "node-1 could not come back" in faults.why_refused(fault, found)
        assert faults.why_refused(fault, found, node="node-0") == ""
    assert faults.why_refused("rank", found, node="node-1") == ""


def test_an_agent_that_is_process_1_of_its_container_needs_its_pod_deleted() -> None:
    found = situation(place="cluster", **reports(pid=1))
    for fault in ("agent", "silence"):
        assert "the fault `pod` takes the whole pod" in faults.why_refused(fault, found)
    assert faults.why_refused("pod", found) == ""


def test_a_script_without_a_known_checkpoint_is_warned_about() -> None:
    config = {**CONFIG, "train": None, "script": {"path": "train.py"}}
    found = situation(config=config, **reports(last_checkpoint_step=None, ranks=[]))
    assert faults.why_refused("agent", found) == ""
    assert any("first step again" in each for each in faults.list_warnings("agent", found))


def test_a_silence_lasts_by_default_until_the_others_have_noticed_it() -> None:
    small = situation()
    large = situation(place="cluster", config={**CONFIG, "nodes": {"min": 64, "max": 64}})
    untimed = {**CONFIG, "train": {"strategy": "ddp", "collectiveTiming": "off"}}
    for found in (small, large, situation(config=untimed)):
        assert faults.default_seconds("silence", found) > faults.silence_bound(found)
    assert faults.silence_bound(situation(config=untimed)) == 300
    (told,) = faults.list_warnings("silence", small, seconds=1.0)
    assert "so they wait for it" in told


@pytest.mark.parametrize("nodes", [1, 2, 5, 8, 9, 32, 33, 64, 1000])
def test_a_silent_node_stays_a_member_as_long_as_the_rendezvous_says(nodes: int) -> None:
    for place, remote in (("local", False), ("cluster", True)):
        timings = RendezvousTimings.for_nodes(nodes, remote=remote)
        found = situation(place=place, config={**CONFIG, "nodes": {"min": 1, "max": nodes}})
        assert faults.silence_bound(found) == timings.keep_alive * timings.keep_alive_attempts


def test_the_last_rank_or_node_is_struck_unless_another_is_named() -> None:
    plan = plan_fault(situation(), "rank")
    assert (plan.node, plan.rank, plan.local_rank, plan.agent) == ("node-1", 1, 0, 101)
    assert plan.action == "kills rank 1 on node-1"
    assert plan_fault(situation(), "pod", node=0).action == "takes away node-0"
    silence = plan_fault(situation(), "silence", node=0, lasts=2.0)
    assert (silence.seconds, silence.action) == (2.0, "stops all processes of node-0 for 2.0 s")
    with pytest.raises(NotFoundError, match="its ranks: 0-1"):
        plan_fault(situation(), "rank", rank=2)
    with pytest.raises(NotFoundError, match="no node 2"):
        plan_fault(situation(), "agent", node=2)
    for fault, options in (("agent", {"rank": 1}), ("rank", {"node": 1}), ("pod", {"lasts": 3.0})):
        with pytest.raises(UsageError):
            plan_fault(situation(), fault, **options)  # type: ignore[arg-type]
