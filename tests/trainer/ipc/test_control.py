"""The control channel: a rank tells that it has left its group, and gets the next one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kdist_trainer.ipc.control import ConnectedRank, ControlServer, GroupControl
from tests.patience import soon


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    made = ControlServer(tmp_path / "control.sock")
    yield made
    made.close()


def connected(server: ControlServer) -> dict[int, ConnectedRank]:
    """The ranks, once the server has read what they have sent."""
    server.poll()
    return server.ranks


def has_left(server: ControlServer, local_rank: int, step: int) -> bool:
    return connected(server)[local_rank].left == step


def has_joined(server: ControlServer) -> bool:
    server.poll()
    return not server.joining


def connect(server: ControlServer, local_rank: int = 0) -> tuple[GroupControl, list[bool]]:
    """A rank's end, and the calls of its `on_leave`."""
    calls: list[bool] = []
    rank = GroupControl(server.path, local_rank=local_rank, on_leave=calls.append)
    assert soon(lambda: local_rank in connected(server))
    return rank, calls


def test_a_rank_that_leaves_gets_the_environment_of_the_next_group(server: ControlServer) -> None:
    rank, _ = connect(server, local_rank=3)
    assert server.ranks[3].pid == os.getpid()
    rank.report_left(17, "RuntimeError: Connection closed by peer")
    assert soon(lambda: has_left(server, 3, 17))
    assert server.ranks[3].why == "RuntimeError: Connection closed by peer"
    server.join(3, {"RANK": "1"})
    assert rank.wait_for_group() == {"RANK": "1"}
    assert server.ranks[3].left is None, "it is in a group again"


def test_a_rank_is_asked_to_leave_until_it_has_left_and_again_in_the_next_group(
    server: ControlServer,
) -> None:
    rank, calls = connect(server)
    for step in (4, 9):
        server.ask_to_leave(0)
        assert soon(lambda: rank.asked_to_leave)
        rank.report_left(step, "asked")
        assert soon(partial(has_left, server, 0, step))
        server.join(0, {})
        rank.wait_for_group()
        assert not rank.asked_to_leave
    assert calls == [True, False, True, False]


def test_a_rank_that_ends_is_forgotten_and_its_successor_takes_its_place(
    server: ControlServer,
) -> None:
    first, _ = connect(server)
    first.close()
    assert soon(lambda: not connected(server))
    second, _ = connect(server)
    second.report_left(-1, "")
    assert soon(lambda: has_left(server, 0, -1))


def test_a_rank_that_waits_for_a_group_is_woken_by_it(server: ControlServer) -> None:
    rank, _ = connect(server)
    got: list[dict[str, str]] = []
    waiting = threading.Thread(target=lambda: got.append(rank.wait_for_group()))
    waiting.start()
    server.join(0, {"WORLD_SIZE": "1"})
    waiting.join(10)
    assert got == [{"WORLD_SIZE": "1"}]


def test_a_worker_joins_its_first_group_once_it_is_ready_for_it(server: ControlServer) -> None:
    server.join_when_ready(2, os.getpid(), {"RANK": "5"})
    rank, _ = connect(server, local_rank=2)
    assert server.joining, "it has joined before it was ready"
    rank.report_left(-1, "")
    assert soon(partial(has_joined, server))
    assert rank.wait_for_group() == {"RANK": "5"}
    assert server.ranks[2].left is None, "it is in a group"


def test_a_worker_in_the_place_of_one_that_did_not_get_ready_does_not_join_its_group(
    server: ControlServer,
) -> None:
    server.join_when_ready(0, os.getpid() + 1, {"RANK": "5"})
    rank, _ = connect(server)
    rank.report_left(-1, "")
    assert soon(partial(has_left, server, 0, -1))
    server.join_when_ready(0, os.getpid(), {"RANK": "6"})
    assert rank.wait_for_group() == {"RANK": "6"}


def test_a_rank_whose_agent_does_not_answer_says_so_and_trains_without_the_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KDIST_CONTROL_SOCKET", str(tmp_path / "gone.sock"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert GroupControl.connect(lambda _: None) is None
    assert '"event":"control-unreachable"' in capfd.readouterr().err


def test_a_rank_whose_agent_restarts_ranks_has_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDIST_CONTROL_SOCKET", raising=False)
    assert GroupControl.connect(lambda _: None) is None


def test_a_rank_tells_of_too_many_groups_in_its_own_group_and_anew_in_the_next_one(
    server: ControlServer,
) -> None:
    rank, _ = connect(server)
    rank.report_crowd(17)
    assert soon(lambda: connected(server)[0].crowd == 17)
    assert server.ranks[0].left is None, "it is in its group"
    rank.report_left(5, "")
    assert soon(lambda: has_left(server, 0, 5))
    assert server.ranks[0].crowd == 17
    server.join(0, {})
    assert server.ranks[0].crowd == 0, "it may have been replaced"
