"""An optimizer that counts in a plain attribute: ranks that go on in place hold different weights
then. It is found before a checkpoint is of them, and all ranks start again from the one before, as
they do after each further loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .forked_run import ForkedRun
from .training_run import describe_job, kill, wait_for_step

RANKS = 3
EVERY = 8
CODE = Path(__file__).parent / "code"


def saves_of(run: ForkedRun, *, generation: int) -> list[dict[str, Any]]:
    """The checkpoints that a group has committed."""
    return [
        one
        for one in run.log("node-0")
        if one["event"] == "checkpoint-committed" and one["generation"] == generation
    ]


def describe(code: Path, *, period: int, steps: int) -> dict[str, Any]:
    train = {
        "workload": "counting:Counting",
        "steps": steps,
        "globalBatch": 12,
        "microBatch": 4,
        "virtualShards": RANKS,
        "checkpoint": {"every": {"steps": EVERY}},
        "options": {"period": period, "pause": 0.03},
    }
    group: dict[str, Any] = {"nodes": 1, "procsPerNode": RANKS, "code": str(code)}
    return describe_job("counting", maxRestarts=1000, train=train, **group)


@pytest.mark.processes
@pytest.mark.parametrize("period", [1, pytest.param(5, marks=pytest.mark.sampled)])
def test_ranks_that_differ_after_a_recovery_in_place_start_again(
    period: int, tmp_path: Path
) -> None:
    """With period 5 they differ some steps later, which only the comparison before a save shows."""
    with ForkedRun(tmp_path, describe(CODE, period=period, steps=60)) as run:
        run.wait_until(lambda: run.events("commit"), f"the checkpoint of step {EVERY}")
        ranks = wait_for_step(run, EVERY + 2, ranks=RANKS)
        kill(ranks[1])
        run.wait_until(lambda: saves_of(run, generation=3), "a checkpoint of the third group")
        kill(wait_for_step(run, EVERY + 2, ranks=RANKS)[1])
        assert run.wait() == 0, run.output()
    log = run.log("node-0")
    (continued,) = [one for one in log if one["event"] == "continued"]
    (found,) = [one for one in log if one["event"] == "replicas-differ"]
    assert found["ranks"] == [1]
    # with the losses of the first step, else before the next save
    before_save = (continued["step"] // EVERY + 1) * EVERY
    first = continued["step"] + 1
    assert found["step"] in ({first} if period == 1 else {first, before_save})
    (said,) = [one for one in log if one["event"] == "not-reproducible"]
    assert said["why"] in said["message"]
    assert "rank 1 holds other weights" in said["why"]
    # generation 2 went on in place and saved nothing; 3 began where the first one had saved
    saves = [one for one in log if one["event"] == "checkpoint-committed"]
    assert {one["generation"] for one in saves} == {1, 3, 4}
    # 4 took nothing over from ranks that would have differed again
    resumed, again = [one for one in log if one["event"] == "resumed"]
    assert again["generation"] == 4
    newest = max(one["step"] for one in saves if one["generation"] == 1)
    assert (resumed["generation"], resumed["step"]) == (3, newest)
    (failure,) = [one for one in run.events("failure") if one["generation"] == 2]
    assert (failure["cause"], failure["signature"]) == ("retry", "replicas-differ")


def lose_a_rank(run: ForkedRun) -> dict[str, Any]:
    """Kill a rank of a group that trains; returns what began the next one, once that trains."""
    begun = run.events("generation")[-1]
    kill(wait_for_step(run, begun["from_step"] + 3, ranks=RANKS)[1])
    following = begun["generation"] + 1

    def has_stepped() -> bool:
        return any(one["generation"] >= following for one in run.events("first_step"))

    run.wait_until(has_stepped, f"a step of generation {following}")
    return next(one for one in run.events("generation") if one["generation"] == following)


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.sampled
def test_once_the_code_is_mended_ranks_continue_in_place_again(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    source = (CODE / "counting.py").read_text()
    (code / "counting.py").write_text(source)
    with ForkedRun(tmp_path, describe(code, period=1, steps=1_000_000)) as run:
        run.wait_until(lambda: run.events("commit"), f"the checkpoint of step {EVERY}")
        assert "kept_step" in lose_a_rank(run)
        run.wait_until(lambda: len(run.events("generation")) == 3, "the restart")
        assert run.events("failure")[-1]["signature"] == "replicas-differ"
        run.wait_until(lambda: saves_of(run, generation=3), "a checkpoint")
        assert run.stop() == 200
        run.start()
        run.wait_until(lambda: len(run.events("generation")) == 4, "the second start")
        assert "kept_step" not in lose_a_rank(run), "the same code would differ again"
        assert run.stop() == 200
        mended = source.replace("self.calls % self.period == 0", "self.calls < 0")
        (code / "counting.py").write_text(mended)
        run.start()
        run.wait_until(lambda: len(run.events("generation")) == 6, "the third start")
        assert "kept_step" in lose_a_rank(run)
        assert "kept_step" in lose_a_rank(run)
        assert run.stop() == 200
