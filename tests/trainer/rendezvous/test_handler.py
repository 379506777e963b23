"""The rendezvous: torch's own protocol with kdist's timings."""

from __future__ import annotations

import itertools
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousInfo

from kdist_trainer.rendezvous.configmap_client import JITTER
from kdist_trainer.rendezvous.handler import Rendezvous, open_rendezvous
from kdist_trainer.rendezvous.state import RendezvousState, RendezvousTimings
from kdist_trainer.rendezvous.stores import FileStore
from kdist_trainer.rendezvous.torch_internals import Node
from tests.patience import soon


@pytest.fixture(autouse=True)
def _stores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here several agents share one process, and with it the variable that each of them sets for a
    while.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


_INDICES = itertools.count()


def meet(
    folder: Path, *, run_id: str = "run", low: int = 1, high: int = 2, index: int | None = None
) -> Rendezvous:
    return open_rendezvous(
        FileStore(folder, timeout_seconds=20),
        run_id=run_id,
        min_nodes=low,
        max_nodes=high,
        address="127.0.0.1",
        index=next(_INDICES) if index is None else index,
        timeout_seconds=60,
    )


def meet_all(nodes: list[Rendezvous]) -> list[RendezvousInfo]:
    """Let all join at once; returns what each was told, in order."""
    found: dict[int, RendezvousInfo] = {}

    def join(index: int) -> None:
        found[index] = nodes[index].next_rendezvous()

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[index] for index in range(len(nodes))]


def test_nodes_meet_and_meet_again(tmp_path: Path) -> None:
    nodes = [meet(tmp_path, low=2) for _ in range(2)]
    assert {(info.rank, info.world_size) for info in meet_all(nodes)} == {(0, 2), (1, 2)}
    again = meet_all(nodes)
    assert {(info.rank, info.world_size) for info in again} == {(0, 2), (1, 2)}
    assert (
        len({info.bootstrap_store_info.master_port for info in again if info.bootstrap_store_info})
        == 1
    )
    for node in nodes:
        node.leave()


def test_a_write_that_conflicts_is_tried_again_on_what_was_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (meet(tmp_path)._state_holder for _ in range(2))
    nodes = [Node("127.0.0.1", index, index) for index in range(3)]

    def write(holder: RendezvousState, node: Node) -> bool | None:
        holder.state.wait_list.add(node)
        holder.mark_dirty()
        return holder.sync()

    def others_write_during_the_pause(*_: float) -> float:
        monkeypatch.undo()
        theirs.expire()
        theirs.sync()
        assert write(theirs, nodes[1])
        return 0.0

    for holder in (ours, theirs):
        holder.sync()
    assert write(theirs, nodes[0])
    monkeypatch.setattr(JITTER, "uniform", others_write_during_the_pause)
    assert write(ours, nodes[2]) is False
    assert ours.state.wait_list == {nodes[0], nodes[1]}
    assert write(ours, nodes[2])


def test_torch_polls_the_state_at_the_interval_of_the_timings_and_pauses_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet(tmp_path, high=2)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    vars(dynamic_rendezvous)["_delay"](seconds=(0, 0.3))  # before the second round
    assert not slept
    for _ in range(20):
        vars(dynamic_rendezvous)["_delay"](seconds=1)
    timings = RendezvousTimings.for_nodes(2)
    assert slept == sorted(slept), "soon after a change of its own, then less often"
    assert timings.first_poll <= slept[0] < slept[-1] == timings.poll
    assert timings.poll <= 0.1


def test_another_run_in_the_same_store_is_another_rendezvous(tmp_path: Path) -> None:
    here, there = meet(tmp_path, high=1), meet(tmp_path, run_id="other", high=1)
    assert [info.world_size for info in meet_all([here, there])] == [1, 1]
    assert (here.status().waiting, here.count_members()) == (0, 1)
    here.leave()
    there.leave()


@pytest.mark.sampled
def test_news_reports_newcomers_from_members_that_left(tmp_path: Path) -> None:
    first, second, third = (meet(tmp_path, low=2, high=3) for _ in range(3))
    meet_all([first, second])
    assert (first.status().waiting, first.status().left) == (0, 0)
    threads = [threading.Thread(target=third.next_rendezvous, daemon=True)]
    threads[0].start()
    wait_for(lambda: first.status().waiting == 1)
    threads.append(threading.Thread(target=second.next_rendezvous, daemon=True))
    threads[1].start()
    wait_for(lambda: first.status().left == 1)
    assert first.status().waiting == 1
    assert first.next_rendezvous().world_size == 3, "all that wait join"
    for thread in threads:
        thread.join(30)
    for node in (first, second, third):
        node.leave()


@pytest.mark.sampled
def test_a_group_runs_once_its_round_is_complete(tmp_path: Path) -> None:
    first, second, third = (meet(tmp_path, low=2, high=3) for _ in range(3))
    joining = [threading.Thread(target=each.next_rendezvous) for each in (first, second)]
    joining[0].start()
    wait_for(lambda: third.count_members() == 1)
    assert third.count_running() == 0, "a node that comes now can join it"
    joining[1].start()
    for thread in joining:
        thread.join(60)
    wait_for(lambda: third.count_running() == 2)
    assert first.count_running() == 0, "it is in this group"
    first.leave()
    second.leave()


def test_a_node_that_is_left_alone_keeps_no_connection_and_misses_none(
    tmp_path: Path,
) -> None:
    before = find_memberships()
    pair = [meet(tmp_path), meet(tmp_path)]
    meet_all(pair)
    assert soon(lambda: len(find_memberships() - before) == 2)
    pair[1].leave()
    meet_all(pair[:1])
    assert soon(lambda: not find_memberships() - before)
    assert (pair[0].count_members(), pair[0].has_silent_members()) == (1, False)
    assert pair[0].status().left == 0


def find_memberships() -> set[threading.Thread]:
    """The threads that follow the connections of members."""
    return {each for each in threading.enumerate() if each.name == "kdist-membership"}


def test_nobody_waits_for_the_word_of_a_node_that_has_left_a_new_group(tmp_path: Path) -> None:
    here, there = meet(tmp_path, low=2), meet(tmp_path, low=2)
    found, _ = meet_all([here, there])
    there.leave()
    with here.watching_departures(), pytest.raises(DistStoreError, match="1 other nodes have left"):
        found.store.get("what the other one never says")
    assert soon(lambda: here.status().left == 1)
    with pytest.raises(DistStoreError, match="wait timeout"):
        found.store.wait(["what is waited for at any other time"], timedelta(seconds=0.2))
    here.leave()


def test_a_closed_rendezvous_turns_everybody_away_and_says_so(tmp_path: Path) -> None:
    node = meet(tmp_path, high=1)
    node.next_rendezvous()
    node.set_closed()
    assert node.status().closed
    with pytest.raises(RendezvousClosedError):
        meet(tmp_path, high=1).next_rendezvous()
    node.leave()


def test_nodes_of_one_address_are_ranked_by_their_index_whichever_came_first(
    tmp_path: Path,
) -> None:
    nodes = [meet(tmp_path, low=3, high=3, index=index) for index in (10, 2, 0)]
    assert [info.rank for info in meet_all(nodes)] == [2, 1, 0]
    for node in nodes:
        node.leave()


@pytest.mark.sampled
def test_the_predecessor_of_a_restarted_agent_is_put_out_at_once(tmp_path: Path) -> None:
    dead, other = meet(tmp_path), meet(tmp_path)
    dead.next_rendezvous()
    assert other.count_members() == 1
    dead._stop_heartbeats()
    other.remove_predecessors({os.getpid() + 1})
    assert other.count_members() == 1, "another process is not meant"
    other.remove_predecessors({os.getpid() + 1, os.getpid()})
    assert soon(lambda: other.count_members() == 0)


def test_large_jobs_look_and_beat_less_often() -> None:
    small, large = RendezvousTimings.for_nodes(2), RendezvousTimings.for_nodes(1024)
    assert small.poll < large.poll <= 1
    assert small.keep_alive < large.keep_alive
    assert small.max_wait < large.max_wait


def wait_for(condition: object, *, seconds: float = 30.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
