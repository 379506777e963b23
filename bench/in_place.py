"""How long a training that recovers in place stalls when it loses a rank or a node and when a node
joins: the time between two steps of the rank that survives, which takes 20 ms for a step.

    python -m bench.in_place [ROUNDS]

On one node with two ranks, in turn rank 0 and rank 1 are killed. On one or two nodes, each an agent
with one rank, in turn an agent is killed, or an agent and its rank are stopped, as by a power cut;
then the node starts again and joins. Either node may be the one, so that the host of the rendezvous
is hit as often as not. With small weights and with 100 MB of them under AdamW.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.recovery import BIN, PATIENCE, Mark, read, running
from bench.table import columns, quantile, title

ROUNDS = 10
RANKS = 2
STEPS_BEFORE = 30
HIDDEN = {"small weights": 64, "100 MB of weights": 5000}
RANK, AGENT = "a rank of two is killed", "an agent of 1:2 is killed"
SILENT, JOINED = "a node of 1:2 falls silent", "a node joins one"


Pauses = dict[str, list[float]]
"""Seconds, by what caused them."""


class Training(NamedTuple):
    """A running training, by its files."""

    process: subprocess.Popen[bytes]
    marks: Path
    runs: Path


def main(rounds: int) -> None:
    """Measure and print."""
    title(f"Recovery in place: pause of the rank that survives, {rounds} of each")
    lines = []
    for name, hidden in HIDDEN.items():
        pauses = measure(rounds, lose_ranks, hidden=hidden, nodes=1, procsPerNode=2)
        pauses |= measure(rounds, lose_nodes, hidden=hidden, nodes={"min": 1, "max": 2})
        for event, seconds in pauses.items():
            middle, late = quantile(seconds, 0.5), quantile(seconds, 0.95)
            lines.append((f"{event}, {name}", f"{middle:.2f} s", f"{late:.2f} s"))
    columns(("", "p50", "p95"), lines)


def measure(rounds: int, lose: Callable[[Training, int], Pauses], **job: Any) -> Pauses:
    """The pauses of a job, by what caused them."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        marks = folder / "marks"
        marks.touch()
        arguments = [str(BIN / "kdist"), "run", write_job(folder, **job)]
        with (
            (folder / "log").open("w") as output,
            running(arguments, environment(folder), output) as process,
        ):
            run = Training(process, marks, folder / "runs")
            wait_for_group(run)
            return lose(run, rounds)


def environment(folder: Path) -> dict[str, str]:
    """The environment of `kdist run`."""
    return {
        **os.environ,
        "KDIST_BENCH_MARKS": str(folder / "marks"),
        "KDIST_HOME": str(folder / "runs"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }


def write_job(folder: Path, *, hidden: int, **fields: Any) -> str:
    """Write a job with these fields of its spec; returns the path of its file."""
    train = {
        "workload": "bench.steady:Steady",
        "options": {"hidden": hidden},
        "steps": 10**6,
        "globalBatch": 128,
        "evaluate": "never",
        "checkpoint": {"every": {"seconds": 600}},
        "recovery": "inPlace",
    }
    spec = {"image": "none", "maxRestarts": 1000, "train": train, **fields}
    job = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "bench"},
        "spec": spec,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return str(folder / "job.yaml")


def lose_ranks(run: Training, rounds: int) -> Pauses:
    """Kill one rank after the other."""
    pauses = []
    for number in range(rounds):
        victim, survivor = sorted(newest(run), key=lambda mark: mark.rank == 1 - number % 2)
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        wait_for_group(run, after=victim.generation)
        pauses.append(longest_pause(run, survivor.pid, after=began))
    return {RANK: pauses}


def lose_nodes(run: Training, rounds: int) -> Pauses:
    """Lose one node after the other, by a kill and by silence, and let each join again."""
    pauses: Pauses = {AGENT: [], SILENT: [], JOINED: []}
    for number, event in itertools.product(range(rounds), (AGENT, SILENT)):
        lost = find_processes(run, f"node-{number % 2}")
        survivor = next(mark for mark in newest(run) if mark.pid not in lost)
        began = time.monotonic()
        if event == AGENT:
            os.kill(lost[0], signal.SIGKILL)
        else:
            run.process.send_signal(signal.SIGSTOP)  # else it would start the agent again
            send(signal.SIGSTOP, lost)
        wait_for_step(run, survivor)
        pauses[event].append(longest_pause(run, survivor.pid, after=began))
        joined = time.monotonic()
        if event == SILENT:
            send(signal.SIGKILL, lost)
            run.process.send_signal(signal.SIGCONT)
        wait_for_group(run, after=survivor.generation)
        pauses[JOINED].append(longest_pause(run, survivor.pid, after=joined))
    return pauses


def send(number: signal.Signals, pids: list[int]) -> None:
    """Send a signal to processes."""
    for pid in pids:
        os.kill(pid, number)


def find_processes(run: Training, node: str) -> list[int]:
    """The pids of a node: its agent, then its ranks."""
    (note,) = run.runs.rglob(f"{node}/agent.json")
    agent: int = json.loads(note.read_text())["pid"]
    return [agent, *(mark.pid for mark in newest(run) if session(mark.pid) == session(agent))]


def session(pid: int) -> int:
    """The session of a process: an agent leads one, with its ranks in it; 0 if it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def newest(run: Training) -> list[Mark]:
    """The last mark of each rank of the newest generation."""
    marks = read(run.marks)
    generation = max((mark.generation for mark in marks), default=0)
    return list({mark.pid: mark for mark in marks if mark.generation == generation}.values())


def wait_for_group(run: Training, *, after: int = 0) -> None:
    """Wait for a generation after `after` with all ranks that has lasted for some steps."""

    def lasts() -> bool:
        last = newest(run)
        if len(last) < RANKS or last[0].generation <= after:
            return False
        steps = Counter(mark.pid for mark in read(run.marks) if mark.generation > after)
        return all(steps[mark.pid] > STEPS_BEFORE and session(mark.pid) for mark in last)

    wait_for(lasts, run)


def wait_for_step(run: Training, rank: Mark) -> None:
    """Wait until this rank has finished a step of the next generation."""
    wait_for(
        lambda: any(
            mark.pid == rank.pid and mark.generation > rank.generation for mark in read(run.marks)
        ),
        run,
    )


def longest_pause(run: Training, pid: int, *, after: float) -> float:
    """The longest time between two steps of a rank, of those that ended after a moment."""
    times = [mark.time for mark in read(run.marks) if mark.pid == pid]
    pairs = itertools.pairwise(times)
    return max(end - start for start, end in pairs if end > after)


def wait_for(condition: Callable[[], object], run: Training) -> None:
    """Wait until it comes true. Raises `RuntimeError` if the training has ended or it is late."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if run.process.poll() is not None or time.monotonic() > end:
            log = run.marks.with_name("log").read_text()
            raise RuntimeError(f"the training does not go on\n{log[-4000:]}")
        time.sleep(0.02)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
