"""How long an elastic training stalls when it loses a node and when one joins: the time between two
steps of the rank that survives.

    python -m bench.elastic [ROUNDS]

One `kdist run` of one or two nodes, each an agent with one rank. In turn an agent is killed, or an
agent and its rank are stopped, as by a power cut; then the node starts again and joins. Either node
may be the one, so that the host of the rendezvous is hit as often as not. With small weights and
with 100 MB of them under AdamW.
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import yaml

from bench.recovery import BIN, PATIENCE, Mark, read, running
from bench.table import columns, quantile, title

ROUNDS = 10
HIDDEN = {"small weights": 64, "100 MB of weights": 5000}
KILLED, SILENT, JOINED = "an agent is killed", "a node falls silent", "a node joins"


class Training(NamedTuple):
    """A running training, by its files."""

    process: subprocess.Popen[bytes]
    marks: Path
    runs: Path


def main(rounds: int) -> None:
    """Measure and print."""
    title(f"Elastic 1:2, pause of the rank that survives, {rounds} of each")
    lines = []
    for name, hidden in HIDDEN.items():
        with tempfile.TemporaryDirectory() as folder:
            for event, pauses in measure(Path(folder), hidden, rounds).items():
                middle, late = quantile(pauses, 0.5), quantile(pauses, 0.95)
                lines.append((f"{event}, {name}", f"{middle:.2f} s", f"{late:.2f} s"))
    columns(("", "p50", "p95"), lines)


def measure(folder: Path, hidden: int, rounds: int) -> dict[str, list[float]]:
    """The pauses in seconds, by what caused them."""
    marks = folder / "marks"
    marks.touch()
    env = {
        **os.environ,
        "KDIST_BENCH_MARKS": str(marks),
        "KDIST_HOME": str(folder / "runs"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    pauses: dict[str, list[float]] = {KILLED: [], SILENT: [], JOINED: []}
    arguments = [str(BIN / "kdist"), "run", write_job(folder, hidden)]
    with (folder / "log").open("w") as output, running(arguments, env, output) as process:
        run = Training(process, marks, folder / "runs")
        wait_for(lambda: len(living(run)) == 2, run)
        for number in range(rounds):
            for event in (KILLED, SILENT):
                lose_node(run, f"node-{number % 2}", event, pauses)
    return pauses


def write_job(folder: Path, hidden: int) -> str:
    """Write the job; returns the path of its file."""
    train = {
        "workload": "bench.steady:Steady",
        "options": {"hidden": hidden},
        "steps": 10**6,
        "globalBatch": 128,
        "evaluate": "never",
        "checkpoint": {"every": {"seconds": 600}},
        "recovery": "inPlace",
    }
    spec = {"image": "none", "nodes": {"min": 1, "max": 2}, "maxRestarts": 1000, "train": train}
    job = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "bench"},
        "spec": spec,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return str(folder / "job.yaml")


def lose_node(run: Training, node: str, event: str, pauses: dict[str, list[float]]) -> None:
    """Lose a node and let it join again; appends the pauses."""
    lost = find_processes(run, node)
    survivor = next(mark.pid for mark in newest(run) if mark.pid not in lost)
    if event == SILENT:  # nobody may start the agent again meanwhile
        run.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    for pid in lost if event == SILENT else lost[:1]:
        os.kill(pid, signal.SIGSTOP if event == SILENT else signal.SIGKILL)
    alone = max(mark.generation for mark in newest(run)) + 1
    wait_for(lambda: has_stepped(run, survivor, alone), run)
    if event == SILENT:
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        run.process.send_signal(signal.SIGCONT)
    pauses[event].append(longest_pause(run, survivor, after=began))
    joined = time.monotonic()
    wait_for(lambda: has_stepped(run, survivor, alone + 1) and len(living(run)) == 2, run)
    pauses[JOINED].append(longest_pause(run, survivor, after=joined))


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


def living(run: Training) -> list[Mark]:
    """The last marks of the ranks of the newest generation, once each has made several."""
    marks = newest(run)
    return [mark for mark in marks if mark.step > 10 and session(mark.pid)]


def has_stepped(run: Training, pid: int, generation: int) -> bool:
    """Whether this rank has finished a step of that generation or a later one."""
    return any(mark.pid == pid and mark.generation >= generation for mark in read(run.marks))


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
