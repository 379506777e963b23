"""What the ranks of each strategy exchange in a step is counted to the byte, and their waiting
taken out of the phases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from kdist_trainer.metrics.rank_metrics import StepPhase
from tests.trainer.training.cells import document, layout
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import train_watched

pytestmark = pytest.mark.processes
STEPS = 6


def weights_of(module: nn.Module) -> list[int]:
    """Bytes of what each part holds that is gathered as one; last the rest of the model, which
    stays gathered.
    """
    blocks = [
        part for part in module.modules() if isinstance(part, FSDPModule) and part is not module
    ]
    held = [sum(weight.nbytes for weight in block.parameters()) for block in blocks]
    return [*held, sum(weight.nbytes for weight in module.parameters()) - sum(held)]


def train_and_tell(strategy: str, size: int, folder: Path) -> dict[str, Any]:
    """Train `gpt` as one rank, and return what it counted over its steps."""
    seconds: list[float] = []
    ranks = layout(strategy, size)
    section = {"steps": STEPS, "virtualShards": size // ranks.get("modelParallel", 1), **ranks}
    run = train_watched(document("gpt", strategy, "fp32", **section), folder, steps=seconds)
    return {
        "phase": list(run.stats.phase),
        "seconds": sum(seconds),
        "count": [count / STEPS for count in run.stats.collectives],
        "bytes": [nbytes / STEPS for nbytes in run.stats.collective_bytes],
        "busy": list(run.stats.collective_seconds),
        "weights": weights_of(run.module),
        "own": [weight.nbytes for weight in run.module.parameters()],
    }


def reported(strategy: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank counted, checked for what holds under any strategy."""
    found = run_group(
        train_and_tell, size, strategy, size, folder, environment={"LOCAL_WORLD_SIZE": "2"}
    )
    for rank in found:
        assert sum(rank["phase"]) == pytest.approx(rank["seconds"], rel=1e-3)
        assert all(seconds >= 0 for seconds in rank["phase"])
        assert 0 < rank["phase"][StepPhase.COMM_EXPOSED] < rank["seconds"]
        for count, nbytes, busy in zip(rank["count"], rank["bytes"], rank["busy"], strict=True):
            assert (count > 0) == (nbytes > 0) == (busy > 0)
            assert busy < rank["seconds"]
    return found


def test_fsdp_gathers_each_block_twice_and_scatters_every_gradient_once(tmp_path: Path) -> None:
    for rank in reported("fsdp", 2, tmp_path):
        *blocks, rest = rank["weights"]
        assert rank["count"] == [0, 2 * len(blocks) + 1, len(blocks) + 1]
        assert rank["bytes"] == [0, 2 * sum(blocks) + rest, sum(blocks) + rest]


@pytest.mark.sampled
@pytest.mark.chaos
def test_hsdp_also_reduces_each_ranks_part_over_the_nodes(tmp_path: Path) -> None:
    for rank in reported("hsdp", 4, tmp_path):
        *blocks, rest = rank["weights"]
        assert rank["count"] == [len(blocks) + 1, 2 * len(blocks) + 1, len(blocks) + 1]
        assert rank["bytes"] == [
            (sum(blocks) + rest) / 2,
            2 * sum(blocks) + rest,
            sum(blocks) + rest,
        ]


def test_tensor_reduces_activations_twice_in_each_layer_forward_and_backward_and_gathers_the_scores(
    tmp_path: Path,
) -> None:
    samples, block, width, layers, scores = 8, 16, 16, 2, 256
    reduced = 2 * 2 * layers + 1  # and the gradient of what the head takes
    for rank in reported("tensor", 2, tmp_path):
        assert rank["count"] == [reduced, 1, 0]
        assert rank["bytes"] == [
            4 * samples * block * width * reduced,
            4 * samples * block * scores,
            0,
        ]


@pytest.mark.sampled
@pytest.mark.chaos
def test_pipeline_reduces_each_stage_over_its_copies(tmp_path: Path) -> None:
    for rank in reported("pipeline", 4, tmp_path):
        # since torch 2.15 the stages agree once on how to exchange: two all-reduces of an int32
        agreed = round(rank["count"][0] * STEPS) - STEPS
        assert agreed in (0, 2), "a bucket in each step"
        assert rank["bytes"][0] * STEPS == pytest.approx(sum(rank["own"]) * STEPS + 4 * agreed)
        assert rank["count"][1:] == rank["bytes"][1:] == [0, 0]
