"""What a worker builds before it has a group: the workload, the model and the training split.

A worker that is started while others train, or as a standby, then joins their group without making
them wait for it. Everything is made in the order in which a group's rank makes it, from generators
with the same seed, and the generators continue from the same states: what a training computes does
not depend on whether its ranks were prepared.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from kdist_trainer import workloads
from kdist_trainer.config import Training
from kdist_trainer.rng import WEIGHTS, Generators, GeneratorStates, derive
from kdist_trainer.stream import Stream
from kdist_trainer.training.model import BuiltModule, build_module
from kdist_trainer.untrusted_text import parse_json
from kdist_trainer.workload import Samples, Workload, WorkloadContext


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """What a worker has built before it has a group.

    Attributes:
        workload: The workload.
        built: The model, with the weights that a new run begins with.
        samples: The training split.
        generators: The states of the generators after these were made.
    """

    workload: Workload
    built: BuiltModule
    samples: Samples | Stream | None
    generators: GeneratorStates


def prepare(train: Training, device: torch.device) -> PreparedTraining:
    """Build what needs no process group.

    Raises:
        Exception: Whatever the user's code raises.
    """
    workload = load_workload(train, device)
    Generators.all(device).seed(derive(train.seed, WEIGHTS))
    built = build_module(train, workload, device)
    samples = workload.dataset("train")
    return PreparedTraining(
        workload=workload, built=built, samples=samples, generators=GeneratorStates.read()
    )


def load_workload(train: Training, device: torch.device) -> Workload:
    """Make the workload that the job names."""
    data = {
        mount: Path(path) for mount, path in parse_json(os.environ.get("KDIST_DATA", "{}")).items()
    }
    return workloads.load(train.workload)(WorkloadContext(train.options, data, train.seed, device))


def warm_up_torch() -> None:
    """Train a tiny model for a step on the CPU: the threads of the autograd engine and of the
    operators start, and torch imports what it needs for a first optimizer step.

    The generators are as before afterwards. The user's model has no part in it, since a step may
    change what no one can restore.
    """
    before = GeneratorStates.read()
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(4, 8)).square().sum().backward()
    optimizer.step()
    before.restore()
