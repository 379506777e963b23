"""Recovery in place: the ranks that survive keep their processes and continue with the very next
step, and no step is computed twice.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .check_ledger import assert_every_sample_once
from .training_run import Rank, TrainingRun, describe_job, is_alive, kill

BATCH, SAMPLES, EPOCHS = 64, 1437, 30
"""Of the training split of `digits`; enough epochs for two failures."""


def describe(name: str, **changes: Any) -> dict[str, Any]:
    train = {
        "workload": "digits",
        "epochs": EPOCHS,
        "globalBatch": BATCH,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 200}},
        **changes.pop("train", {}),
    }
    return describe_job(name, train=train, **{"nodes": 1, "procsPerNode": 2, **changes})


def wait_for_step(run: TrainingRun, step: int) -> list[Rank]:
    """The live ranks once the ledger has `step`."""
    run.wait_until(lambda: run.steps() and run.steps()[-1]["step"] >= step, f"step {step}")
    return run.ranks()


def wait_for_generation(run: TrainingRun, number: int, *, world_size: int) -> None:
    """Until generation `number` of that size has finished a step."""

    def has_stepped() -> bool:
        lines = [line for line in run.steps() if line["generation"] >= number]
        return any(line["world_size"] == world_size for line in lines)

    run.wait_until(has_stepped, f"a step of generation {number} with {world_size} ranks")


def assert_nothing_was_repeated(run: TrainingRun) -> None:
    """Each step is in the ledger once, in order, and nobody reports a lost one."""
    steps = [line["step"] for line in run.steps()]
    assert steps == list(range(1, steps[-1] + 1))
    assert run.report()["steps"]["lost"] == 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' hash of the same run without faults."""
    with TrainingRun(tmp_path_factory.mktemp("uninterrupted"), describe("calm")) as run:
        assert run.wait() == 0, run.output()
    weights: str = run.done()["weights"]
    return weights


@pytest.mark.processes
def test_the_survivor_of_a_killed_rank_keeps_its_process_and_no_step_is_done_twice(
    uninterrupted: str, tmp_path: Path
) -> None:
    with TrainingRun(tmp_path, describe("killed")) as run:
        ranks = wait_for_step(run, 20)
        kill(ranks[0].pid)
        wait_for_generation(run, 2, world_size=2)
        after = run.ranks()
        assert after[1].pid == ranks[1].pid, "the survivor was restarted"
        assert after[0].pid != ranks[0].pid
        assert run.wait() == 0, run.output()
    assert_nothing_was_repeated(run)
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)
    assert run.done()["weights"] == uninterrupted


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("when", ["in", "end", "after", "later"])
def test_the_best_evaluation_has_a_checkpoint_of_its_step_if_a_rank_is_lost_there(
    when: str, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    keep = {"last": 100, "best": {"metric": "loss", "goal": "min"}}
    train = {
        "workload": "evaluated:Evaluated",
        "epochs": 3,
        "evaluateEverySteps": 10,
        "checkpoint": {"every": {"steps": 200}, "keep": keep},
    }
    env = [{"name": "KILL_AT", "value": when}, {"name": "KILLED", "value": str(killed)}]
    code = str(Path(__file__).parent / "code")
    with TrainingRun(tmp_path, describe("best", train=train, code=code, env=env)) as run:
        assert run.wait() == 0, run.output()
    assert killed.exists()
    assert_nothing_was_repeated(run)
    committed = [each["step"] for each in run.events("commit")]
    assert committed.count(30) == 1
    assert [step for step in committed[:-1] if step % 10] == []


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_node_leaves_and_returns_while_the_other_keeps_its_process(
    how: signal.Signals, tmp_path: Path
) -> None:
    job = describe("elastic", nodes={"min": 1, "max": 2}, procsPerNode=1)
    job["spec"]["train"]["epochs"] = 10_000
    with TrainingRun(tmp_path, job) as run:
        wait_for_generation(run, 1, world_size=2)
        survivor = next(rank.pid for rank in run.ranks() if rank.node == "node-0")
        lost = [run.agents()["node-1"]]
        lost += [rank.pid for rank in run.ranks() if rank.node == "node-1"]
        run.process.send_signal(signal.SIGSTOP)  # nobody starts the agent again
        for pid in lost:
            os.kill(pid, how)
        wait_for_generation(run, 2, world_size=1)
        assert is_alive(survivor), "the survivor was restarted"
        if how is signal.SIGSTOP:
            for pid in lost:
                kill(pid)
        run.process.send_signal(signal.SIGCONT)
        wait_for_generation(run, 3, world_size=2)
        assert survivor in [rank.pid for rank in run.ranks()], "the join has restarted it"
        newcomer = next(rank.pid for rank in run.ranks() if rank.node == "node-1")
        assert_was_prepared(run, newcomer)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    assert_nothing_was_repeated(run)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("why", ["asked to stop", "nobody comes"])
def test_a_survivor_that_waits_in_vain_saves_what_it_has_kept(why: str, tmp_path: Path) -> None:
    job = describe("alone", nodes=2, procsPerNode=1, rendezvousTimeoutSeconds=10)
    with TrainingRun(tmp_path, job) as run:
        wait_for_generation(run, 1, world_size=2)
        agents = run.agents()
        run.process.send_signal(signal.SIGSTOP)  # nobody starts the lost agent again
        kill(agents["node-1"])
        waiting = "rendezvous-started"
        run.wait_until(lambda: count_events(run, waiting) == 2, "the survivor's wait for a group")
        if why == "asked to stop":
            os.kill(agents["node-0"], signal.SIGTERM)
        run.wait_until(lambda: not is_alive(agents["node-0"]), "the end of the survivor")
        trained = run.steps()[-1]["step"]
        kept = next(event for event in run.log("node-0") if event["event"] == "saving-kept-state")
        assert kept["step"] == trained
        assert run.events("commit")[-1]["step"] == trained
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGCONT)
        assert run.wait() == 130, run.output()
        run.start()
        assert run.wait() == 0, run.output()
        said = [event for event in run.log("node-0") if event["event"] == "not-reproducible"]
        assert not said, "the rank that saved alone has computed nothing"
    steps = [line["step"] for line in run.steps()]
    assert steps == list(range(1, steps[-1] + 1))
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)


def count_events(run: TrainingRun, name: str) -> int:
    """How many events of this name node-0 has logged."""
    return sum(event["event"] == name for event in run.log("node-0"))


@pytest.mark.sampled
@pytest.mark.processes
def test_all_ranks_are_restarted_if_the_job_says_so(tmp_path: Path) -> None:
    train = {"recovery": "restart", "epochs": 10_000, "checkpoint": {"every": {"steps": 5}}}
    job = describe("restarted", train=train)
    with TrainingRun(tmp_path, job) as run:
        before = wait_for_step(run, 20)
        kill(before[1].pid)
        wait_for_generation(run, 2, world_size=2)
        assert not {rank.pid for rank in before} & {rank.pid for rank in run.ranks()}
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()


def assert_was_prepared(run: TrainingRun, newcomer: int) -> None:
    """The newcomer's process was ready before its node joined, and before the others paused."""
    own = run.log("node-1")
    prepared = next(
        event for event in own if event["event"] == "worker-prepared" and event["pid"] == newcomer
    )
    joined = next(
        event
        for event in own
        if event["event"] == "rendezvous-completed" and event["generation"] == 3
    )
    paused = next(event for event in run.log("node-0") if event["event"] == "joining")
    assert prepared["time"] < paused["time"] < joined["time"]
    assert {"rank", "pid"} <= {
        key
        for event in own
        if event["event"] == "worker-started" and event["pid"] == newcomer
        for key in event
    }
