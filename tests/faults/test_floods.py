"""Strangers flood every listener of a training's agents, and it ends with the weights that it would
have had: no agent ends, and none of them takes more memory, descriptors or threads.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kdist_trainer.network.server import STRANGERS
from tests.draw import read_seed
from tests.house.tree import ROOT

from .sockets import listeners
from .test_in_place import describe, wait_for_step
from .test_listeners import describe as describe_varied
from .training_run import TrainingRun

SECONDS = float(os.environ.get("KDIST_FLOOD_SECONDS", "600"))
NODES, EPOCHS = 2, 12
PLACES: dict[str, Any] = {"nodes": NODES, "procsPerNode": 1}
PAUSE = 0.1  # seconds that a step of the long flood takes at least
MEMORY = 96 << 20
"""The most bytes by which an agent may grow: what the kernel and Python keep of many clients."""


class Use(NamedTuple):
    """What a process uses."""

    memory: int
    descriptors: int
    threads: int


def use_of(pid: int) -> Use:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return Use(
        int(fields["VmRSS"].split()[0]) << 10,
        len([*Path(f"/proc/{pid}/fd").iterdir()]),
        int(fields["Threads"]),
    )


def listening(pid: int) -> list[str]:
    """Where a process accepts connections, as ADDRESS:PORT; IPv4, as the runs here have."""
    own = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(str(path.readlink()))
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    found = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return [
        "{}.{}.{}.{}:{}".format(*reversed(bytes.fromhex(at[:8])), int(at[9:], 16)) for at in found
    ]


@contextmanager
def flooding(targets: list[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.faults.flood", read_seed(ROOT), *targets]
    flood = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
        assert flood.poll() is None, "the flood itself has ended"
    finally:
        flood.kill()
        flood.wait()


def refused(port: int) -> float:
    """The connections that an agent has closed, by its own metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("kdist_connections_refused_total{")
    )


def job(name: str) -> dict[str, Any]:
    return describe(name, nodes=NODES, procsPerNode=1, train={"epochs": EPOCHS})


class Peak:
    """The most that each agent of a run has used since its first step."""

    def __init__(self, run: TrainingRun) -> None:
        self.pids = run.agents()
        self.ports = [self._port(run, node) for node in self.pids]
        self.before = {node: use_of(pid) for node, pid in self.pids.items()}
        self.most = dict(self.before)
        self.refused = 0.0

    def _port(self, run: TrainingRun, node: str) -> int:
        return int(json.loads((run.folder / node / "agent.json").read_text())["port"])

    def look(self) -> None:
        for node, pid in self.pids.items():
            with suppress(OSError, KeyError):  # it is about to end
                self.most[node] = Use(*map(max, self.most[node], use_of(pid)))
        with suppress(OSError):  # the flood is before this request, or the agent has ended
            self.refused = max(self.refused, *map(refused, self.ports))

    def __str__(self) -> str:
        return "\n".join(
            f"  {node}: {before.memory >> 20} -> {most.memory >> 20} MiB, "
            f"{before.descriptors} -> {most.descriptors} descriptors, "
            f"{before.threads} -> {most.threads} threads"
            for (node, before), most in zip(self.before.items(), self.most.values(), strict=True)
        )


def train_flooded(home: Path, document: dict[str, Any], weights: str) -> Peak:
    """Run the training under a flood from its fifth step to its end."""
    with TrainingRun(home, document) as run:
        wait_for_step(run, 5)
        peak = Peak(run)
        targets = sorted({at for pid in peak.pids.values() for at in listening(pid)})
        assert all(at.startswith("127.0.0.1:") for at in targets), targets
        assert len(targets) > NODES, "each agent's exporter, and the exchange of the round"
        with flooding(targets):
            while not run.has_ended():
                peak.look()
                time.sleep(0.2)
        assert run.wait() == 0, run.output()
        assert {line["generation"] for line in run.steps()} == {1}, "no agent was lost"
        assert run.done()["weights"] == weights
    return peak


def check(peak: Peak) -> None:
    places = 2 * STRANGERS + 2 * NODES + 16
    for node, before in peak.before.items():
        most = peak.most[node]
        assert most.descriptors <= before.descriptors + places, str(peak)
        assert most.threads <= before.threads + 1, str(peak)
        assert most.memory <= before.memory + MEMORY, str(peak)
    assert peak.refused > STRANGERS


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' hash of the training that nobody floods."""
    with TrainingRun(tmp_path_factory.mktemp("quiet"), job("quiet")) as run:
        assert run.wait() == 0, run.output()
    found: str = run.done()["weights"]
    return found


@pytest.mark.processes
@pytest.mark.sampled
def test_a_flooded_training_ends_with_its_weights_and_its_agents_do_not_grow(
    tmp_path: Path, weights: str
) -> None:
    peak = train_flooded(tmp_path / "flooded", job("flooded"), weights)
    print(f"{peak}\n  {peak.refused:.0f} connections refused")  # noqa: T201 - what a reader asks for
    check(peak)


def starve(pid: int) -> None:
    """Lower a process's limit of open files to what it has open, as if it had used up all."""
    own = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in range(len(own) + 1) if number not in own)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))


@pytest.mark.processes
@pytest.mark.sampled
def test_agents_that_have_no_descriptor_left_supervise_a_training_to_its_end(
    tmp_path: Path, weights: str
) -> None:
    with TrainingRun(tmp_path / "starved", job("starved")) as run:
        wait_for_step(run, 5)
        ports = []
        for node, pid in run.agents().items():
            ports.append(json.loads((run.folder / node / "agent.json").read_text())["port"])
            starve(pid)
        for port in ports:
            with socket.create_connection(("127.0.0.1", port), 60) as refused:
                assert refused.recv(1) == b"", "closed with a descriptor from the reserve"
        assert run.wait() == 0, run.output()
        assert {line["generation"] for line in run.steps()} == {1}
        assert run.done()["weights"] == weights


SCRIPT = """
import os
import torch.distributed as dist
import torch
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
opened = []
try:
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for _ in range(50):
    total = torch.ones(1)
    dist.all_reduce(total)
assert total.item() == dist.get_world_size()
for descriptor in opened:
    os.close(descriptor)
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.sampled
def test_a_script_that_uses_up_its_descriptors_ends_as_it_would(tmp_path: Path) -> None:
    document = job("greedy")
    del document["spec"]["train"]
    document["spec"] |= {"script": {"path": "greedy.py"}, "code": "./src"}
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "greedy.py").write_text(SCRIPT)
    with TrainingRun(tmp_path, document) as run:
        assert run.wait() == 0, run.output()


WORKING = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
end = time.monotonic() + 15
working = torch.ones(1)
number = 0
while working.item():
    number += 1
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    working = torch.tensor([float(time.monotonic() < end)])
    dist.broadcast(working, 0)
    time.sleep(0.01)
print("collectives", number, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.chaos
@pytest.mark.sampled
@pytest.mark.processes
def test_a_script_whose_store_is_flooded_ends_as_it_would(tmp_path: Path) -> None:
    document = describe("script", nodes=1, procsPerNode=2)
    del document["spec"]["train"]
    document["spec"] |= {"script": {"path": "working.py"}, "code": "./src", "maxRestarts": 0}
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "working.py").write_text(WORKING)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with TrainingRun(tmp_path, document) as run:

        def doors() -> list[str]:
            found = [each for each in listeners(run.processes()) if each.port < first]
            return [f"127.0.0.1:{each.port}" for each in found]

        targets = run.wait_until(doors, "the store of the script")
        (agent,) = run.agents().values()
        before = most = use_of(agent)
        with flooding(targets):
            while not run.has_ended():
                with suppress(OSError, KeyError):  # it is about to end
                    most = Use(*map(max, most, use_of(agent)))
                time.sleep(0.2)
        print(f"{targets}: {before} -> {most}")  # noqa: T201 - what a reader asks for
        assert run.wait() == 0, run.output()
        assert "collectives" in run.output()
    assert most.descriptors <= before.descriptors + 2 * STRANGERS + 20


@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.processes
@pytest.mark.timeout(4 * SECONDS + 600)
def test_a_training_that_is_flooded_for_ten_minutes_ends_with_its_weights(tmp_path: Path) -> None:
    steps = round(SECONDS / PAUSE)
    with TrainingRun(tmp_path / "quiet", describe_varied("quiet", steps=steps, **PLACES)) as run:
        assert run.wait(SECONDS + 300) == 0, run.output()
    flooded = describe_varied("flooded", steps=steps, pause=PAUSE, **PLACES)
    began = time.monotonic()
    peak = train_flooded(tmp_path / "flooded", flooded, run.done()["weights"])
    seconds = time.monotonic() - began
    print(f"{seconds:.0f} s\n{peak}\n  {peak.refused:.0f} connections refused")  # noqa: T201
    check(peak)
    assert seconds >= SECONDS
