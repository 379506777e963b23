"""Whoever is on the machine next to a training under `kdist run` gets into none of its processes:
all listen on the loopback alone, ranks refuse newcomers once they are connected, and listeners end
with the group that they served. A flood costs no bit of the weights.

KDIST_GENERATIONS says how many generations (10), KDIST_FLOOD_SECONDS how long a flood lasts (15).
"""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from .sockets import LOOPBACK, Listener, connect, listeners, own_addresses
from .test_soak import wait_for_steps
from .training_run import TrainingRun, describe_job, kill

GENERATIONS = int(os.environ.get("KDIST_GENERATIONS", "10"))
FLOOD_SECONDS = float(os.environ.get("KDIST_FLOOD_SECONDS", "15"))
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc tells who listens"),
]


def describe(name: str, *, steps: int, pause: float = 0.005, **spec: Any) -> dict[str, Any]:
    train = {
        "workload": "varied:Varied",
        "options": {"norms": True, "pause": pause},
        "steps": steps,
        "globalBatch": 24,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 50}},
    }
    code = str(Path(__file__).parent / "code")
    return describe_job(name, maxRestarts=100_000, code=code, train=train, **spec)


def open_doors(run: TrainingRun) -> dict[int, int]:
    """How many listeners of each process let a stranger in."""
    found: dict[int, int] = {}
    for each in listeners(run.processes()):
        found[each.pid] = found.get(each.pid, 0) + (connect(each.port) == "connected")
    return found


def stores(run: TrainingRun, pid: int) -> set[Listener]:
    """Of a rank's listeners those of its group's stores, whose ports are below the others'."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return {each for each in listeners([pid]) if each.port < first}


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_after_many_generations_nothing_listens_that_lets_strangers_in_or_that_is_left_over(
    nodes: int, tmp_path: Path
) -> None:
    job = describe("doors", steps=1_000_000, nodes=nodes, procsPerNode=2 // nodes)
    with TrainingRun(tmp_path, job) as run:
        ranks = wait_for_steps_of_all(run)
        survivor = ranks[0].pid
        lost = ranks[-1]
        for _ in range(GENERATIONS):
            kill(lost.pid)
            ranks = wait_for_steps_of_all(run, after=lost.beat.step + 1)
            lost = next(rank for rank in ranks if rank.pid != survivor)
            assert {each.address for each in listeners(run.processes())} <= LOOPBACK
        doors = open_doors(run)
        assert {pid: doors.get(pid, 0) for pid in (rank.pid for rank in ranks)} == {
            rank.pid: 0 for rank in ranks
        }, "a stranger gets into a rank"
        agents = run.agents().values()
        assert sum(doors.values()) == sum(doors.get(pid, 0) for pid in agents)
        assert all(doors.get(pid, 0) <= 2 for pid in agents), "the exporter, and the exchange"
        kept = [each for rank in ranks for each in stores(run, rank.pid)]
        assert len(kept) == 1, "the store of the group that trains, and of none before"
        for address in own_addresses():
            assert connect(kept[0].port, host=address) == "ConnectionRefusedError"
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()


def wait_for_steps_of_all(run: TrainingRun, after: int = 0) -> list[Any]:
    """The two ranks of the run, by number on their nodes, once both train in the same group."""

    def are_there() -> list[Any]:
        ranks = sorted(run.ranks(), key=lambda rank: (rank.node, rank.number))
        beats = [rank.beat for rank in ranks]
        ready = (
            len(beats) == 2
            and all(beat.phase.name in ("STEP", "DATA") and beat.step > after for beat in beats)
            and len({beat.generation for beat in beats}) == 1
        )
        return ranks if ready else []

    found: list[Any] = run.wait_until(are_there, "both ranks to train", every=0.005)
    return found


class Flood:
    """Connects to all that the ranks of a run listen at: idle, with random bytes, with a key whose
    value has a GiB. Connections that get in are kept.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.tries = self.entered = 0
        self.descriptors = self.kilobytes = 0
        self._run = run
        self._held: list[socket.socket] = []
        self._random = random.Random(1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._flood, daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Flood within the `with` block."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()
            for each in self._held:
                each.close()

    def _flood(self) -> None:
        payloads = (b"", self._random.randbytes(4096), b"\0" + (1 << 30).to_bytes(8, "little"))
        while not self._ended.is_set():
            pids = [rank.pid for rank in self._run.ranks()]
            for each in listeners(pids):
                for number in range(250):
                    self._connect(each.port, payloads[number % len(payloads)])
            for pid in pids:
                self._measure(pid)

    def _connect(self, port: int, payload: bytes) -> None:
        self.tries += 1
        one = socket.socket()
        one.setblocking(False)
        with suppress(OSError):
            one.connect(("127.0.0.1", port))
        with suppress(OSError):
            one.getpeername()
            one.send(payload)
            self.entered += 1
        self._held.append(one)
        if len(self._held) > 1000:
            self._held.pop(0).close()

    def _measure(self, pid: int) -> None:
        with suppress(OSError, IndexError):  # it has just ended
            self.descriptors = max(
                self.descriptors, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            )
            status = Path(f"/proc/{pid}/status").read_text()
            self.kilobytes = max(self.kilobytes, int(status.partition("VmRSS:")[2].split()[0]))


def train(home: Path, *, steps: int, seconds: float, flooded: bool) -> tuple[str, Flood]:
    """Train, under a flood for so many seconds at least and losing a rank at first; returns the
    weights' hash.
    """
    pause = max(0.005, seconds / steps) if flooded else 0.0
    places = {"nodes": 1, "procsPerNode": 2}
    with TrainingRun(home, describe("flooded", steps=steps, pause=pause, **places)) as run:
        flood = Flood(run)
        with flood.running() if flooded else nullcontext():
            began = time.monotonic()
            lost = wait_for_steps(run)[1]
            if flooded:
                kill(lost.pid)
                wait_for_steps(run, after=lost.beat.step + 1)
            while flooded and time.monotonic() - began < seconds and not run.has_ended():
                time.sleep(0.1)  # what is waited for is the length of the flood
            assert run.wait(max(300, 3 * seconds, steps / 10)) == 0, run.output()
        weights: str = run.done()["weights"]
    return weights, flood


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_flood_of_a_trainings_ranks_costs_no_bit_of_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_flood(tmp_path, FLOOD_SECONDS, capsys)


@pytest.mark.wide
@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_flood_of_ten_minutes_costs_no_bit_of_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_flood(tmp_path, 600.0, capsys)


def check_flood(home: Path, seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare the weights of a flooded training with those of one without, and print what the
    flood cost.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    steps = max(400, round(10 * seconds))
    calm, _ = train(home / "calm", steps=steps, seconds=0, flooded=False)
    weights, flood = train(home / "flooded", steps=steps, seconds=seconds, flooded=True)
    with capsys.disabled():
        sys.stderr.write(
            f"\n{flood.tries} connections tried, {flood.entered} seen open; a rank had at most "
            f"{flood.descriptors} of {soft} descriptors and {flood.kilobytes // 1024} MiB\n"
        )
    assert weights == calm
    assert flood.tries > 1000
