"""Where starting takes longer than the time between losses: told with both times, and counted
against the limit of restarts, also where nodes are asked to end and none fails.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from kdist_trainer.agent.coordination import STOP, AgentStore, Generation
from kdist_trainer.agent.restart_policy import (
    RestartLedger,
    SingleStart,
    describe_slow_start,
    final_failure,
    was_starting,
)
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.config import Cause, Exit
from kdist_trainer.config.train_config import RESTARTS
from kdist_trainer.ipc.failure import Failure
from tests.trainer.agent.test_restart_policy import MANAGED

SAID = "starting takes longer than the time between losses: the last"
LATE = {"rank_states": {"node-0": [{"step": 0, "sequence": 0}]}}
Event = dict[str, Any]


def group(number: int, at: float, *ended: Event, reason: str = "failure") -> list[Event]:
    began = {"event": "generation", "generation": number, "reason": reason, "time": at}
    return [{**began, "from_step": 0}, *ended]


def lost(number: int, at: float, *, waited: float = 0.0) -> Event:
    fields = {"generation": number, "time": at, "at_start": True, "waited": waited}
    return {"event": "failure", **fields}


def stepped(number: int, at: float) -> Event:
    return {"event": "first_step", "generation": number, "time": at}


def losses(*times: float) -> list[Event]:
    """Groups that begin a second after the loss before them and are lost as they start."""
    found = []
    for number, (before, at) in enumerate(itertools.pairwise((0.0, *times)), start=10):
        found += group(number, before + 1, lost(number, at))
    return found


def test_three_losses_in_a_row_of_groups_that_start_are_said_with_both_times() -> None:
    assert describe_slow_start(losses(5.0, 9.0)) == ""
    told = describe_slow_start(losses(5.0, 9.0, 15.0))
    assert told == (
        f"{SAID} 3 worker groups were lost 4.0 s apart, before their first step, and a start takes "
        "more than 6.0 s"
    )
    assert len(told) < 256, "as /status carries it"


def test_a_start_that_was_measured_before_is_the_second_number() -> None:
    began = group(1, 0.0, stepped(1, 20.0), {"event": "failure", "generation": 1, "time": 30.0})
    again = group(2, 31.0, stepped(2, 48.0), {"event": "failure", "generation": 2, "time": 50.0})
    late = [
        *group(3, 51.0, lost(3, 55.0)),
        *group(4, 56.0, lost(4, 60.0)),
        *group(5, 61.0, lost(5, 65.0)),
    ]
    told = describe_slow_start([*began, *again, *late])
    assert told.endswith("lost 5.0 s apart, before their first step, and a start takes 19.0 s")


def test_the_time_that_agents_wait_before_a_group_is_no_time_between_losses() -> None:
    events = [
        *group(1, 0.0, lost(1, 2.0)),
        *group(2, 3.0, lost(2, 4.0, waited=60.0)),
        *group(3, 65.0, lost(3, 66.0)),
    ]
    assert "lost 2.0 s apart" in describe_slow_start(events)


@pytest.mark.parametrize(
    "between",
    [
        [stepped(11, 8.0)],
        [{"event": "commit", "step": 5, "time": 8.0}],
        [{"event": "failure", "generation": 11, "time": 8.0}],
        group(11, 8.0, reason="resume"),
    ],
    ids=["a step", "a commit", "a loss later than the start", "a restart by hand"],
)
def test_what_shows_that_a_group_has_started_ends_the_row(between: list[Event]) -> None:
    early, late = losses(5.0, 9.0, 15.0), losses(20.0, 24.0)
    assert describe_slow_start([*early, *late])
    assert describe_slow_start([*early, *between, *late]) == ""


def test_a_group_was_starting_only_if_something_tells() -> None:
    def ask(document: Event, *events: Event, is_script: bool = False, tells: bool = True) -> bool:
        begun = [{**group(2, 0.0)[0], "from_step": 7}, *events]
        return was_starting(document, 2, begun, is_script=is_script, tells=tells)

    def state(step: int, sequence: int = 0) -> Event:
        return {"rank_states": {"node-0": [{"step": step, "sequence": sequence}]}}

    assert ask({})
    assert ask(state(7, 30))
    assert not ask(state(8))
    assert not ask({}, stepped(2, 3.0))
    assert not ask({}, tells=False), "without a ledger of steps nobody tells"
    script = {"is_script": True, "tells": False}
    assert not ask({}, **script)
    assert ask(state(-1), **script)
    assert not ask(state(-1, 3), **script), "it was seen in a collective"
    assert ask(state(-1, 3), stepped(1, 3.0), **script), "its groups tell their first steps"
    assert not ask(state(4), stepped(1, 3.0), **script), "it has reported a step"


def take_nodes_at_start(job: RestartLedger, store: AgentStore, times: int) -> list[Generation]:
    """Generations of which a node is asked to end as the ranks start."""
    found = []
    for _ in range(times):
        found.append(job.open_generation({"node-0": "a"}, world_size=1))
        states = LATE["rank_states"]["node-0"]
        store.plan_stop(found[-1].number, STOP, rank_states=states)
    return found


def test_nodes_that_are_always_asked_to_end_as_ranks_start_use_up_the_restarts(
    tmp_path: Path,
) -> None:
    store = AgentStore(HashStore(), run_id="run", node="node-0")
    rule = SingleStart(MANAGED, store)
    job = RestartLedger(store, checkpoints=tmp_path, limits={RESTARTS: 3}, single_start=rule)
    begun = take_nodes_at_start(job, store, 5)
    assert [each.restarts for each in begun] == [0, 1, 2, 3, 4]
    assert [each.reason for each in begun[1:]] == ["failure"] * 4
    assert begun[-1].exhausted
    assert SAID in begun[-1].over
    end = Failure(Cause.PREEMPTED, Exit.STOPPED, True, "a node was asked to end")
    ended = final_failure(end, begun[-1], begun[-1].over, collectives=())
    assert (ended.cause, ended.signature) == (Cause.BUDGET, "slow-start")
    assert "nodes that live longer" in ended.advice


def test_a_node_that_is_asked_to_end_after_a_step_costs_no_restart(tmp_path: Path) -> None:
    store = AgentStore(HashStore(), run_id="run", node="node-0")
    rule = SingleStart(MANAGED, store)
    job = RestartLedger(store, checkpoints=tmp_path, limits={RESTARTS: 1}, single_start=rule)
    for number in range(1, 6):
        generation = job.open_generation({"node-0": "a"}, world_size=1)
        assert (generation.number, generation.restarts) == (number, 0)
        assert generation.reason == ("start" if number == 1 else "resume")
        RunLedger(tmp_path).append("first_step", generation=number, step=1, seconds=0.1)
        store.plan_stop(number, STOP, rank_states=LATE["rank_states"]["node-0"])
