"""Exported weights are the model: a plain module that takes them over computes what the training
computed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kdist_trainer import workloads
from kdist_trainer.checkpoint import export
from kdist_trainer.workload import WorkloadContext
from tests.trainer.training.cells import WORKLOADS, document
from tests.trainer.training.tasks import done, train_here


def digest(state: dict[str, Tensor]) -> str:
    """What DONE says of a model's weights."""
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(
            name.encode() + state[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return sha.hexdigest()


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.chaos), "fsdp"])
def test_a_plain_module_with_the_exported_weights_computes_the_same(
    tmp_path: Path, strategy: str
) -> None:
    section: dict[str, Any] = {"steps": 6, "emaDecay": 0.5, "evaluate": "end", "strategy": strategy}
    train_here(document("gpt", precision="fp32", **section), tmp_path, 2)
    root = tmp_path / "checkpoints"
    for name, average in (("plain", False), ("average", True)):
        export.write_file(export.prepare(root, average=average), tmp_path / name)
    gpt = workloads.load("gpt")(WorkloadContext(WORKLOADS["gpt"]["options"]))
    model = gpt.model().eval()
    model.load_state_dict(load_file(tmp_path / "plain"))
    assert digest(model.state_dict()) == done(tmp_path)["weights"]
    model.load_state_dict(load_file(tmp_path / "average"))
    assert mean_loss(gpt, model) == pytest.approx(done(tmp_path)["metrics"]["loss"], rel=1e-5)


def mean_loss(workload: Any, model: nn.Module) -> float:
    """Loss of the whole test split, in one piece."""
    samples = workload.dataset("test")
    with torch.no_grad():
        loss, count = workload.loss(model, samples.fetch(torch.arange(len(samples))))
    return float(loss) / int(count)
