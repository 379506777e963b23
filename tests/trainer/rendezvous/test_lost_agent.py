"""An agent is killed at every point of a round, be it the host of the exchange, the one that
gathers the nodes, or another member: the others form the next generation, and no number stands for
two of them.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.rendezvous.configmap_client import ApiEndpoint
from tests import patience
from tests.trainer.rendezvous.api_server import ApiServer
from tests.trainer.rendezvous.control_plane import NAME, NAMESPACE, ControlPlane
from tests.trainer.rendezvous.members import (
    GATHERING_POINTS,
    MEMBER_POINTS,
    POINTS,
    Job,
    be_member,
)

_SIZE = 3


def lose_agent(
    folder: Path, server: ApiEndpoint, *, namespace: str, name: str, **order: Any
) -> list[dict[str, Any]]:
    """Run agents, of which one kills itself; what the others have written down once they have
    formed a generation of their own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer.rendezvous.members"])
    folder.mkdir()
    point = order["point"]
    job = Job(
        server,
        namespace,
        name,
        folder,
        _SIZE,
        run_id=f"run-{point}",
        gathers=point in GATHERING_POINTS,
        **order,
    )
    agents = [context.Process(target=be_member, args=(job, index)) for index in range(_SIZE)]
    for agent in agents:
        agent.start()
    try:
        assert patience.soon(lambda: (folder / "killed").exists(), 60)

        def alone() -> bool:
            """Whether all that live have formed a generation without the one that was killed."""
            living = [index for index, agent in enumerate(agents) if agent.is_alive()]
            lines = [read(folder, index) for index in living]
            nodes = [f"node-{index}" for index in living]
            return len(living) == _SIZE - 1 and all(
                found and found[-1]["nodes"] == nodes for found in lines
            )

        assert patience.soon(alone, 60), [read(folder, index) for index in range(_SIZE)]
    finally:
        (folder / "end").touch()
        for agent in agents:
            agent.join(60)
            agent.kill()
    return [line for index in range(_SIZE) for line in read(folder, index)]


def read(folder: Path, index: int) -> list[dict[str, Any]]:
    path = folder / f"{index}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def check_numbers(lines: list[dict[str, Any]], *, point: str) -> None:
    """Each number stands for one set of nodes, and grows; one that was given and not heard of is
    not given again.
    """
    nodes: dict[int, list[str]] = {}
    for line in lines:
        assert nodes.setdefault(line["number"], line["nodes"]) == line["nodes"]
        assert f"node-{line['index']}" in line["nodes"]
    for index in range(_SIZE):
        numbers = [line["number"] for line in lines if line["index"] == index]
        assert numbers == sorted(set(numbers))
    if point == "numbered":
        assert min(nodes) > 1, "the first number was that of the agent that was killed"


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("point", [*POINTS, *GATHERING_POINTS, *MEMBER_POINTS])
def test_an_agent_killed_anywhere_is_left_behind_and_no_number_is_used_twice(
    tmp_path: Path, api: ApiServer, point: str
) -> None:
    """Once a round is complete, the others do not wait until its keep-alives are missed."""
    server = ApiEndpoint("127.0.0.1", api.port, scheme="http", account=api.account)
    keep_alive = None if point in ("listening", *GATHERING_POINTS) else 600.0
    lines = lose_agent(
        tmp_path / "job", server, namespace="ml", name="store", point=point, keep_alive=keep_alive
    )
    check_numbers(lines, point=point)


@pytest.mark.e2e
@pytest.mark.sampled
def test_the_same_in_a_real_api_server(tmp_path: Path) -> None:
    with ControlPlane(tmp_path / "plane") as plane:
        for point in (*POINTS, *GATHERING_POINTS):
            lines = lose_agent(
                tmp_path / point, plane.server(), namespace=NAMESPACE, name=NAME, point=point
            )
            check_numbers(lines, point=point)
