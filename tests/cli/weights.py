"""Weights to start from, as a program that trains models writes them."""

from __future__ import annotations

from safetensors.torch import save

from kdist_trainer.workload import WorkloadContext
from kdist_trainer.workloads.digits import Digits


def make_weights() -> bytes:
    """A safetensors file with all weights of the workload `digits`."""
    model = Digits(WorkloadContext()).model()
    return save({name: value.contiguous() for name, value in model.state_dict().items()})
