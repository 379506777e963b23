"""Which nodes an agent declares dead: those whose keep-alives stop, whatever their clocks say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
)

from kdist_trainer.rendezvous.state import RendezvousState, RendezvousTimings
from kdist_trainer.rendezvous.torch_internals import Node
from kdist_trainer.torch_internals import HashStore

PACE = replace(RendezvousTimings.for_nodes(2), poll=0.0, keep_alive=0.05, keep_alive_attempts=3)
HERE, THERE = Node("10.0.0.1", 7, 0), Node("10.0.0.2", 7, 0)


def open_state(*, complete: bool = False, node: Node = HERE) -> RendezvousState:
    """A state with two nodes in it, whose clocks are an hour apart."""
    settings = RendezvousSettings(
        "run", 1, 2, RendezvousTimeout(), timedelta(seconds=PACE.keep_alive), 3
    )
    state = RendezvousState(C10dRendezvousBackend(HashStore(), "run"), settings, PACE)
    state.node = node
    state.sync()
    state.state.participants = {HERE: 0, THERE: 1}
    state.state.complete = complete
    now = datetime.now(UTC)
    state.state.last_heartbeats = {HERE: now, THERE: now - timedelta(hours=1)}
    state.mark_dirty()
    state.sync()
    return state


def beat(state: RendezvousState, *nodes: Node) -> None:
    for node in nodes:
        state.state.last_heartbeats[node] += timedelta(seconds=1)
    state.mark_dirty()
    state.sync()


def watch(state: RendezvousState, seconds: float, each: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state.sync()
        each()
        time.sleep(0.01)


def test_a_node_whose_clock_is_wrong_lives_as_long_as_it_beats() -> None:
    state = open_state()
    watch(state, 0.4, lambda: beat(state, HERE, THERE))
    assert set(state.state.participants) == {HERE, THERE}


def test_a_node_that_stops_beating_is_dropped_while_a_group_forms() -> None:
    state = open_state()
    watch(state, 0.4, lambda: beat(state, HERE))
    assert set(state.state.participants) == {HERE}


def test_a_group_at_work_keeps_a_silent_node_until_a_member_has_left_to_form_another() -> None:
    state = open_state(complete=True)
    watch(state, 0.4, lambda: beat(state, HERE))
    assert set(state.state.participants) == {HERE, THERE}
    assert state.silent == {THERE}
    waiting = Node("10.0.0.3", 7, 0)
    state.state.wait_list.add(waiting)
    state.state.last_heartbeats[waiting] = datetime.now(UTC)
    state.mark_dirty()
    state.sync()
    assert set(state.state.participants) == {HERE, THERE}, (
        "an agent may pause while a newcomer waits"
    )
    del state.state.participants[HERE]
    state.state.wait_list.add(HERE)
    state.mark_dirty()
    state.sync()
    state.sync()
    assert not state.state.participants
    assert waiting in state.state.wait_list


def test_who_waits_to_join_evicts_a_group_that_is_silent_as_a_whole_and_no_part_of_one() -> None:
    waiting = Node("10.0.0.3", 7, 0)
    state = open_state(complete=True, node=waiting)
    state.state.wait_list.add(waiting)
    state.state.last_heartbeats[waiting] = datetime.now(UTC)
    state.mark_dirty()
    state.sync()
    watch(state, 0.4, lambda: beat(state, waiting, HERE))
    assert set(state.state.participants) == {HERE, THERE}
    watch(state, 0.4, lambda: beat(state, waiting))
    assert not state.state.participants


def test_a_store_that_was_away_makes_nobody_dead() -> None:
    state = open_state()
    time.sleep(0.4)  # nobody could look, and nobody could beat
    state.sync()
    assert set(state.state.participants) == {HERE, THERE}
