"""Which strategy runs in which precision on how many ranks: the table of
docs/explanation/strategies.md, and one short training of each.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

from kdist_trainer.checkpoint import ledger
from kdist_trainer.config import Training
from kdist_trainer.formats import LEDGER, STEPS_FILE
from tests.trainer.training.tasks import describe, train_here

OFFLOADED = "fsdp with offload: cpu"
STRATEGIES: tuple[str, ...] = (*get_args(Training.model_fields["strategy"].annotation), OFFLOADED)
PRECISIONS: tuple[str, ...] = get_args(Training.model_fields["precision"].annotation)
SIZES = (1, 2, 4)
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5, "bf16": 2e-2, "bf16-params": 2e-2, "fp16": 5e-2}
"""Largest relative distance of a step's loss from that of one rank with ddp in the same
precision.
"""
STEPS = 50
WORKLOADS: dict[str, dict[str, Any]] = {
    "digits": {"options": {"width": 4, "dropout": 0.0}, "globalBatch": 24},
    "gpt": {
        "options": {"width": 16, "heads": 2, "block": 16, "corpusBytes": 65536},
        "globalBatch": 8,
    },
}


def refusal(workload: str, strategy: str, size: int) -> str:
    """Why a strategy does not train a workload on so many ranks; empty where it does."""
    if strategy == "data_parallel" and size > 1:
        return f"one process with several GPUs, and this job has {size} ranks"
    if strategy == "tensor" and workload == "digits":
        return "Digits.tensor_plan gives none"
    return ""


def layout(strategy: str, size: int) -> dict[str, Any]:
    """What job.yaml must say besides: with four ranks there are two copies of the model."""
    return {"modelParallel": min(size, 2)} if strategy in ("tensor", "pipeline") else {}


def document(workload: str, strategy: str, precision: str, **section: Any) -> dict[str, Any]:
    """A training of 50 steps without anything drawn at random, so that all cells should learn the
    same.
    """
    return describe(
        **{
            "workload": workload,
            "epochs": None,
            "steps": STEPS,
            "strategy": strategy.split()[0],
            "offload": "cpu" if strategy == OFFLOADED else "none",
            "precision": precision,
            "virtualShards": 4,
            # Plain descent: Adam divides by gradients that are nothing but rounding where a weight
            # hardly matters.
            "optimizer": {"name": "sgd", "learningRate": 0.05, "momentum": 0.0},
            **WORKLOADS[workload],
            **section,
        }
    )


def losses(folder: Path, *, generation: int = 1) -> list[float]:
    """Loss of every step of a generation of the training in `folder`, in order."""
    lines = ledger.read_lines(folder / "checkpoints" / LEDGER / STEPS_FILE)
    return [
        float.fromhex(line["loss"])
        for line in sorted(lines, key=lambda line: line["step"])
        if line["generation"] == generation
    ]


def learn(
    folder: Path, size: int, workload: str, strategy: str, precision: str, **section: Any
) -> list[float]:
    """Losses of one cell's training."""
    train_here(
        document(workload, strategy, precision, **{**layout(strategy, size), **section}),
        folder,
        size,
    )
    return losses(folder)


def distance(found: list[float], expected: list[float]) -> float:
    """Largest relative distance of two courses of the loss; infinite where one is longer."""
    if len(found) != len(expected):
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


def table() -> str:
    """The Markdown table of what runs."""
    rows = ["| strategy | " + " | ".join(PRECISIONS) + " |", "|---|" + "---|" * len(PRECISIONS)]
    for strategy in STRATEGIES:
        able = [workload for workload in WORKLOADS if not refusal(workload, strategy, 1)]
        refused = [size for size in SIZES if refusal(able[0], strategy, size)]
        ranks = " and ".join(str(size) for size in refused)
        word = (
            f"1 rank; refused on {ranks}: {refusal(able[0], strategy, refused[0]).split(',')[0]}"
            if refused
            else "1, 2, 4 ranks"
        )
        word += "".join(
            f"; refused for `{workload}`" for workload in WORKLOADS if workload not in able
        )
        rows.append(f"| `{strategy}` | " + " | ".join([word] * len(PRECISIONS)) + " |")
    return "\n".join(rows)
