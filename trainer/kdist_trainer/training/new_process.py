"""Makes the model, the optimizer and the scheduler that a new process of the job would make, and
leaves no trace: generators, and the globals of the workload's module, are restored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kdist_trainer.config import Training
from kdist_trainer.parallel.ddp import Replicated
from kdist_trainer.rng import GeneratorStates
from kdist_trainer.training.model import cast_model, make_ema
from kdist_trainer.training.optimizer import make_optimizer
from kdist_trainer.training.training_state import TrainingState
from kdist_trainer.workload import Workload


@contextmanager
def as_new_process(
    train: Training, workload: Workload, training: TrainingState, *, steps: int
) -> Iterator[TrainingState | None]:
    """Within the `with` block, what a new process has, on the CPU. None if the user's code raises
    when it is called once more.

    Args:
        train: Settings of the training.
        workload: The workload, of which another one is made.
        training: The present training.
        steps: Steps of the run.
    """
    with _without_trace(workload, training.world.device):
        try:
            fresh = _build(train, workload, training, steps=steps)
        except Exception:  # noqa: BLE001 - the user's code may raise anything
            fresh = None
        yield fresh


def _build(
    train: Training, workload: Workload, training: TrainingState, *, steps: int
) -> TrainingState:
    other = type(workload)(workload.context)
    module = cast_model(train, other, training.world.device).module
    strategy: Any = Replicated()
    strategy.module = module
    optimizer = make_optimizer(train, other, module)
    return replace(
        training,
        strategy=strategy,
        module=module,
        optimizer=optimizer,
        scheduler=other.scheduler(optimizer, train.schedule, steps=steps),
        ema=make_ema(train, module),
    )


@contextmanager
def _without_trace(workload: Workload, device: torch.device) -> Iterator[None]:
    """Within the `with` block user code runs whose traces are removed."""
    generators = GeneratorStates.read()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    namespaces = [(one, dict(vars(one))) for one in _namespaces(workload)]
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        generators.restore()
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        for owner, before in namespaces:
            _restore(owner, before)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _namespaces(workload: Workload) -> list[Any]:
    """The user's classes that a workload is of, and their modules."""
    classes = [
        one
        for one in type(workload).__mro__
        if one.__module__.partition(".")[0] not in ("builtins", "abc", "kdist_trainer")
    ]
    names = {one.__module__ for one in classes}
    return [*classes, *(sys.modules[name] for name in names if name in sys.modules)]


def _restore(owner: Any, before: dict[str, Any]) -> None:
    """Give a class or module the attributes that it had."""
    now = dict(vars(owner))
    for name in now.keys() - before.keys():
        delattr(owner, name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            setattr(owner, name, value)
