"""Says at the start of a training which plain attributes of model and optimizer nothing keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from kdist_trainer import log
from kdist_trainer.state import Attributes, describe_changed, describe_changed_optimizer
from kdist_trainer.training.context import TrainContext


@contextmanager
def watch_attributes(ctx: TrainContext) -> Iterator[None]:
    """Undo what the passes in the `with` block change in attributes of the model, and log it; the
    first step of the optimizer is watched too.
    """
    if ctx.world.is_rank_zero:
        _watch_step(ctx.optimizer)
    attributes = Attributes(ctx.module)
    yield
    changed = attributes.restore()
    if changed and ctx.world.is_rank_zero:
        log.warn("attributes-not-kept", message=f"a pass changes {describe_changed(changed)}")


def _watch_step(optimizer: Optimizer) -> None:
    before: list[Attributes] = []

    def note(_optimizer: Optimizer, _args: Any, _named: Any) -> None:
        before.append(Attributes(optimizer))

    def report(_optimizer: Optimizer, _args: Any, _named: Any) -> None:
        for hook in hooks:
            hook.remove()
        changed = before[0].find_changed()
        if changed:
            log.warn(
                "attributes-not-kept",
                message=f"a step changes {describe_changed_optimizer(changed)}",
            )

    hooks = [
        optimizer.register_step_pre_hook(note),
        optimizer.register_step_post_hook(report),
    ]
