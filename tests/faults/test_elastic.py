"""Nodes leave and come back while the training goes on: no sample is lost or used twice, and a join
costs no step.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.stream import StreamSamples

from .check_ledger import assert_every_sample_once, kept_steps
from .code.streamed import EACH, SHARDS, make_stream
from .training_run import TrainingRun, describe_job, kill

BATCH = 48
EPOCHS = 10_000
"""More than a test waits for."""


def describe_elastic(name: str, low: int, high: int, *, epochs: int, shards: int) -> dict[str, Any]:
    train = {
        "workload": "digits",
        "epochs": epochs,
        "globalBatch": BATCH,
        "virtualShards": shards,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 10}},
    }
    return describe_job(name, nodes={"min": low, "max": high}, train=train)


def world_sizes(run: TrainingRun) -> list[int]:
    """World sizes of the generations that made progress, repeats folded."""
    sizes: list[int] = []
    for event in run.events("generation"):
        if not sizes or sizes[-1] != event["world_size"]:
            sizes.append(event["world_size"])
    return sizes


def wait_for_progress(run: TrainingRun, size: int, more: int = 15) -> None:
    """Until the group of `size` has done `more` steps in its newest generation."""

    def advanced() -> bool:
        generations = run.events("generation")
        if not generations or generations[-1]["world_size"] != size:
            return False
        newest: int = generations[-1]["generation"]
        return len([line for line in run.steps() if line["generation"] == newest]) >= more

    run.wait_until(advanced, f"{more} steps with {size} ranks", every=0.05)


def lose_and_return(run: TrainingRun, node: str, high: int, low: int) -> None:
    """Kill the node's agent, keep the node away while `low` ranks go on, then let it come back."""
    wait_for_progress(run, high)
    run.process.send_signal(signal.SIGSTOP)  # nobody starts the agent again: the node is away
    kill(run.agents()[node])
    wait_for_progress(run, low)
    run.process.send_signal(signal.SIGCONT)
    wait_for_progress(run, high)


def assert_joins_are_free(run: TrainingRun) -> None:
    """Each planned join goes on at the very step after the last one done."""
    joins = [event for event in run.events("generation") if event["reason"] == "join"]
    assert joins, "nobody joined by plan"
    for join in joins:
        before = [line["step"] for line in run.steps() if line["generation"] < join["generation"]]
        after = [line["step"] for line in run.steps() if line["generation"] >= join["generation"]]
        assert min(after) == max(before) + 1 == join["from_step"] + 1


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("low", "high", "shards", "node"),
    [
        pytest.param(2, 3, 3, "node-0", id="three-two-three-and-agent-0-is-the-one-lost"),
    ],
)
def test_a_node_leaves_and_comes_back(
    low: int, high: int, shards: int, node: str, tmp_path: Path
) -> None:
    with TrainingRun(
        tmp_path, describe_elastic("elastic", low, high, epochs=EPOCHS, shards=shards)
    ) as run:
        lose_and_return(run, node, high, high - 1)
        run.process.send_signal(signal.SIGINT)  # save and stop: there is nothing more to be seen
        assert run.wait() == 130, run.output()
    sizes = world_sizes(run)
    assert [high, high - 1, high] == [size for size in sizes if size in (high, high - 1)][-3:], (
        sizes
    )
    assert_joins_are_free(run)
    assert_every_sample_once(run.steps(), total=run.events("stopped")[-1]["step"] * BATCH)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_streaming_set_of_hugging_face_is_read_once_while_a_node_leaves_and_comes_back(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    job = describe_elastic("streamed", 2, 3, epochs=EPOCHS, shards=3)
    spec = job["spec"]
    spec["code"] = str(Path(__file__).parent / "code")
    del spec["train"]["epochs"]
    named = {"workload": "streamed:Streamed", "options": {"notes": str(notes)}}
    spec["train"] |= {**named, "steps": 1_000_000, "loader": {"workers": 2}}
    with TrainingRun(tmp_path, job) as run:
        lose_and_return(run, "node-1", 3, 2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    assert world_sizes(run)[-3:] == [3, 2, 3]
    last = run.events("stopped")[-1]["step"]
    assert_every_sample_once(run.steps(), total=last * BATCH)
    counted = {(line["step"], line["generation"]) for line in kept_steps(run.steps())}
    used: Counter[int] = Counter()
    for line in (line for file in notes.iterdir() for line in file.read_text().splitlines()):
        step, generation, *ids = map(int, line.split())
        if (step, generation) in counted:
            used.update(ids)
    samples = StreamSamples(make_stream(), batch=BATCH, shards=3, seed=0)
    assert used == Counter(int(samples[place]["id"]) for place in range(last * BATCH))
    assert last * BATCH > SHARDS * EACH, "it ended in its first pass"
    passes = last * BATCH // (SHARDS * EACH)
    assert {used[number] for number in range(SHARDS * EACH)} <= {passes, passes + 1}


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.timeout(600)
def test_a_node_leaves_with_a_copy_that_its_ranks_share_and_brings_one_back(tmp_path: Path) -> None:
    """Two nodes of two ranks: `tensor` goes on with one copy of the model, then with two again."""
    train = {
        "workload": "gpt",
        "options": {"layers": 1, "width": 16, "heads": 2, "block": 16, "corpusBytes": 65536},
        "steps": 1_000_000,
        "globalBatch": 8,
        "strategy": "tensor",
        "modelParallel": 2,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 10}},
    }
    with TrainingRun(
        tmp_path, describe_job("copies", nodes={"min": 1, "max": 2}, procsPerNode=2, train=train)
    ) as run:
        lose_and_return(run, "node-1", 4, 2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    assert world_sizes(run)[-3:] == [4, 2, 4]
    assert_joins_are_free(run)
    assert_every_sample_once(run.steps(), total=run.events("stopped")[-1]["step"] * 8)
