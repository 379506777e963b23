"""An evaluation that is left before its end: by an error, after which a rank keeps its state if the
model is unchanged, or since a rank is asked to stop.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kdist_trainer.checkpoint.ledger import RunLedger, read_lines
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.training import evaluation, trainer
from kdist_trainer.training.context import TrainContext
from kdist_trainer.workload import WorkloadContext
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import Small, describe, done, losses, train, train_here


class Scalars(Small):
    """Its summary has numbers of NumPy and torch."""

    def summarize(self, means: dict[str, float]) -> dict[str, Any]:
        return {"accuracy": np.float32(0.5), "perplexity": torch.tensor(2.0), **means}


@pytest.mark.processes
def test_a_summary_of_numpy_and_torch_is_kept_as_numbers(tmp_path: Path) -> None:
    keep = {"last": 1, "best": {"metric": "accuracy", "goal": "max"}}
    checkpoint = {"every": {"steps": 2}, "mode": "blocking", "keep": keep}
    section = {"epochs": 1, "evaluateEverySteps": 2, "checkpoint": checkpoint}
    document = describe(workload=f"{__name__}:Scalars", **section)
    assert train_here(document, tmp_path, 1) == ["done"]
    ledger = RunLedger(tmp_path / "checkpoints")
    metrics = next(one["metrics"] for one in ledger.events() if one["event"] == "evaluated")
    assert (metrics["accuracy"], metrics["perplexity"]) == (0.5, 2.0)


class Unswapped(Small):
    """Uses other weights in its evaluation, which fails before they are put back."""

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, int]]:  # noqa: ARG002 - it fails
        if self.context.options["swaps"]:
            with torch.no_grad():
                next(model.parameters()).mul_(2)
        raise RuntimeError("a peer is lost")


def leave(folder: Path, swaps: bool) -> bool:
    """Leave an evaluation by an error; whether the state of the rank counts as whole then."""
    seen: list[TrainContext] = []
    original = trainer.setup

    def setup(ctx: TrainContext) -> None:
        seen.append(ctx)
        original(ctx)

    section = {"evaluate": "end", "epochs": 1, "options": {"swaps": swaps}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "setup", setup)
        with pytest.raises(RuntimeError, match="a peer is lost"):
            train(describe(workload=f"{__name__}:Unswapped", **section), folder)
    return seen[0].is_consistent


@pytest.mark.processes
@pytest.mark.parametrize("swaps", [False, True])
def test_a_state_is_kept_only_if_the_evaluation_has_left_the_model_as_it_was(
    swaps: bool, tmp_path: Path
) -> None:
    environment = {"KDIST_CHECKPOINTS": str(tmp_path / "checkpoints")}
    assert run_group(leave, 2, tmp_path, swaps, environment=environment) == [not swaps] * 2


class Stopped(Small):
    """Looks after each batch whether it is asked to stop, and is in the second one, on rank 1.
    Options: swaps, whether it evaluates other weights from its first batch to the summary; asks,
    whether it is asked at all.
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.batches = 0
        evaluation._MOST_BATCHES = 1  # type: ignore[misc]

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, int]]:
        self.batches += 1
        if self.batches == 1 and self.context.options["swaps"]:
            with torch.no_grad():
                next(model.parameters()).mul_(2)
        self.model_of_now = model
        asked = self.context.options["asks"] and os.environ["RANK"] == "1" and self.batches == 2
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return {**super().evaluate(model, batch)}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        if self.context.options["swaps"]:
            with torch.no_grad():
                next(self.model_of_now.parameters()).div_(2)
        return {**means, "batches": float(self.batches)}


def train_stopped(
    folder: Path, *, generation: int = 1, asks: bool = True, **more: Any
) -> list[str]:
    """Train `Stopped` on two ranks; every evaluation has ten batches, of a sample each."""
    section = {"epochs": 2, "microBatch": 1, "globalBatch": 12, **more}
    options = {"swaps": False, "asks": asks, **section.pop("options", {})}
    document = describe(workload=f"{__name__}:Stopped", options=options, **section)
    return train_here(document, folder, 2, generation=generation)


@pytest.mark.processes
@pytest.mark.parametrize("when", [{"evaluate": "end"}, {"evaluateEverySteps": 4}])
def test_a_stop_does_not_wait_for_the_end_of_an_evaluation(
    when: dict[str, Any], tmp_path: Path
) -> None:
    assert train_stopped(tmp_path / "whole", asks=False, **when) == ["done"] * 2
    stopped = tmp_path / "stopped"
    assert train_stopped(stopped, **when) == ["stopped"] * 2
    newest, ledger = Lock(stopped / "checkpoints").find_newest(), RunLedger(stopped / "checkpoints")
    assert newest is not None, "the finished step is saved"
    assert newest.step == read_lines(stopped / "checkpoints" / LEDGER / STEPS_FILE)[-1]["step"]
    events = [one["event"] for one in ledger.events()]
    assert "evaluated" not in events
    assert "done" not in events
    assert train_stopped(stopped, generation=2, asks=False, **when) == ["done"] * 2
    first = next(one for one in ledger.events() if one["event"] == "evaluated")
    assert first["step"] == newest.step, "what was left is done again"
    assert first["metrics"]["batches"] == 10
    assert done(stopped)["weights"] == done(tmp_path / "whole")["weights"]
    everything = {**losses(stopped), **losses(stopped, generation=2)}
    assert everything == losses(tmp_path / "whole")


@pytest.mark.processes
def test_an_evaluation_of_other_weights_is_not_left_with_them(tmp_path: Path) -> None:
    options = {"swaps": True}
    assert train_stopped(tmp_path, options=options, evaluateEverySteps=4) == ["stopped"] * 2
    events = RunLedger(tmp_path / "checkpoints").events()
    (evaluated,) = [one for one in events if one["event"] == "evaluated"]
    assert evaluated["metrics"]["batches"] == 10
