"""How long a training that recovers in place stalls when it loses ranks or a node and when a node
joins: the time between two steps of a rank that survives. The step that a kill interrupts is
computed again, so a pause contains about one and a half steps.

    python -m bench.in_place [ROUNDS [small|large]]

On one node ranks are killed in turn; of three ranks also a second one while the group forms again.
On one or two nodes, each an agent with one rank, in turn an agent is
killed, or an agent and its rank are stopped, as by a power cut; then the node starts again and
joins. Either node may be the one, so that the host of the rendezvous is hit as often as not. Last,
two nodes of which each must be there, and one that stands by. With small weights and with 100 MB of
them under AdamW.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.marks import Mark, environment, read, running, write_job
from bench.recovery import BIN, PATIENCE
from bench.table import quantile, title

ROUNDS = 10
STEPS_BEFORE, SECONDS_BEFORE = 8, 1.0
"""How long a group trains at least before the next event."""
SECOND_AFTER = 0.05
"""Seconds between two kills, so that the second meets a group that is forming."""
OF_A_ROUND = {"node-standby", "rendezvous-completed"}
"""How an agent's round of the rendezvous may end."""
SIZES = {"small": (64, "small weights"), "large": (5000, "100 MB of weights")}
"""Units of the hidden layer, and what that amounts to."""
RANK = "a rank of two is killed"
THIRD, TWO = "a rank of three is killed", "a rank of three, and 0.05 s later another"
AGENT = "an agent of 1:2 is killed"
SILENT, JOINED = "a node of 1:2 falls silent", "a node joins one"
MEMBER = "an agent of a fixed 2 is killed, with a standby node"


Pauses = dict[str, list[float]]
"""Seconds, by what caused them."""


class Training(NamedTuple):
    """A running training, by its files."""

    process: subprocess.Popen[bytes]
    marks: Path
    runs: Path
    ranks: int
    """Ranks of the whole group."""


def main(rounds: int, sizes: Sequence[str]) -> None:
    """Measure, and print each line as soon as it is known."""
    title(f"Recovery in place: pause of a rank that survives, {rounds} of each")
    row = "  {:<68}{:>8}{:>8}{:>8}".format
    print(row("", "p50", "p95", "a step"), flush=True)
    for hidden, name in (SIZES[size] for size in sizes):
        for scenario in SCENARIOS:
            pauses, step = measure(rounds, scenario, hidden)
            for event, seconds in pauses.items():
                found = (quantile(seconds, 0.5), quantile(seconds, 0.95), step)
                print(row(f"{event}, {name}", *(f"{each:.2f} s" for each in found)), flush=True)


def measure(rounds: int, scenario: Scenario, hidden: int) -> tuple[Pauses, float]:
    """The pauses of a job, by what caused them, and the seconds of a step without one."""
    train = {
        "workload": "bench.steady:Steady",
        "options": {"hidden": hidden},
        "steps": 10**6,
        "globalBatch": 128,
        "evaluate": "never",
        "checkpoint": {"every": {"seconds": 600}},
        "recovery": "inPlace",
    }
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        arguments = [str(BIN / "kdist"), "run", write_job(folder, {"train": train, **scenario.job})]
        with (
            (folder / "log").open("w") as output,
            running(arguments, environment(folder), output) as process,
        ):
            run = Training(process, folder / "marks", folder / "runs", scenario.ranks)
            wait_for_group(run)
            return scenario.lose(run, rounds), step_seconds(run)


def lose_ranks(run: Training, rounds: int) -> Pauses:
    """Kill one rank after the other."""
    return {RANK: [lose_rank(run, number % 2) for number in range(rounds)]}


def lose_rank(run: Training, rank: int) -> float:
    """Kill a rank of two; returns the pause of the other."""
    victim, survivor = sorted(newest(run), key=lambda mark: mark.rank != rank)
    began = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    wait_for_group(run, after=victim.generation)
    return longest_pause(run, survivor.pid, after=began)


def lose_more_ranks(run: Training, rounds: int) -> Pauses:
    """Kill one of three ranks, then two of them one after the other, and so on."""
    pauses: Pauses = {THIRD: [], TWO: []}
    for number, event in itertools.product(range(rounds), (THIRD, TWO)):
        first, second, survivor = sorted(newest(run), key=lambda mark: (mark.rank + number) % 3)
        began = time.monotonic()
        os.kill(first.pid, signal.SIGKILL)
        if event == TWO:
            time.sleep(SECOND_AFTER)
            os.kill(second.pid, signal.SIGKILL)
        wait_for_group(run, after=first.generation)
        pauses[event].append(longest_pause(run, survivor.pid, after=began))
    return pauses


def lose_members(run: Training, rounds: int) -> Pauses:
    """Kill the agents of a group's nodes one after the other, each when the node that stands by is
    ready.
    """
    pauses = []
    for number in range(rounds):
        wait_for(lambda: has_spare_node(run), run)
        victim, survivor = sorted(newest(run), key=lambda mark: mark.rank != number % 2)
        began = time.monotonic()
        os.kill(session(victim.pid), signal.SIGKILL)
        wait_for_group(run, after=victim.generation)
        pauses.append(longest_pause(run, survivor.pid, after=began))
    return {MEMBER: pauses}


def has_spare_node(run: Training) -> bool:
    """Whether a node stands by whose rank has loaded what it needs."""

    def is_ready(node: str) -> bool:
        found = events(run, node)
        last = [each["event"] for each in found if each["event"] in OF_A_ROUND][-1:]
        prepared = [each["pid"] for each in found if each["event"] == "worker-prepared"]
        return last == ["node-standby"] and bool(prepared) and session(prepared[-1]) != 0

    return any(is_ready(f"node-{number}") for number in range(3))


def events(run: Training, node: str) -> list[dict[str, Any]]:
    """The events in the log of a node, oldest first."""
    (log,) = run.runs.rglob(f"{node}/log")
    lines = log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


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
        if len(last) < run.ranks or last[0].generation <= after:
            return False
        marks = [mark for mark in read(run.marks) if mark.generation == last[0].generation]
        steps = Counter(mark.pid for mark in marks)
        return marks[-1].time - marks[0].time > SECONDS_BEFORE and all(
            steps[mark.pid] > STEPS_BEFORE and session(mark.pid) for mark in last
        )

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


def step_seconds(run: Training) -> float:
    """The median time between two steps of the same group."""
    last: dict[int, Mark] = {}
    found = []
    for mark in read(run.marks):
        before = last.get(mark.pid)
        if before is not None and before.generation == mark.generation:
            found.append(mark.time - before.time)
        last[mark.pid] = mark
    return statistics.median(found)


def wait_for(condition: Callable[[], object], run: Training) -> None:
    """Wait until it comes true. Raises `RuntimeError` if the training has ended or it is late."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if run.process.poll() is not None or time.monotonic() > end:
            log = run.marks.with_name("log").read_text()
            raise RuntimeError(f"the training does not go on\n{log[-4000:]}")
        time.sleep(0.02)


class Scenario(NamedTuple):
    """What a job loses."""

    lose: Callable[[Training, int], Pauses]
    job: dict[str, Any]
    ranks: int


SCENARIOS = (
    Scenario(lose_ranks, {"nodes": 1, "procsPerNode": 2}, 2),
    Scenario(lose_more_ranks, {"nodes": 1, "procsPerNode": 3}, 3),
    Scenario(lose_nodes, {"nodes": {"min": 1, "max": 2}}, 2),
    Scenario(lose_members, {"nodes": {"min": 2, "max": 2, "standby": 1}}, 2),
)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS, sys.argv[2:] or list(SIZES))
