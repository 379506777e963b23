"""Checks what a workload returns before it is used: model, optimizer, scheduler and loss.

torch finds most of these mistakes later, and advises settings that a job does not have. A loss that
is a mean instead of a sum would train wrongly without any error.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from kdist_trainer.errors import CheckpointMismatchError, ConfigError
from kdist_trainer.state import eval_mode
from kdist_trainer.workload import LrSchedule, Workload

_LENGTHS: Final = (
    "total_steps",
    "T_max",
    "total_iters",
    "milestones",
    "num_training_steps",
    "num_steps",
    "max_steps",
)
"""How schedulers call what follows from the length of a run."""
_MOST_NAMES: Final = 5


def find_optimizer_problem(optimizer: object, model: nn.Module) -> str | None:
    """Why the training loop cannot train a model with an optimizer; None if it can."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        return (
            f"optimizer(): returns a {kind}, and the loop takes one torch.optim.Optimizer: combine "
            "several in one class of your own"
        )
    if isinstance(optimizer, LBFGS) or _needs_arguments(optimizer.step):
        return (
            f"optimizer(): {kind}.step() computes the loss again (it needs a closure), and the "
            "loop computes it once for each step: use an optimizer whose step() takes no "
            "arguments, such as AdamW or SGD"
        )
    # a user's own optimizer may take sparse gradients, unless it is derived from one that does not
    sparse = {
        model.get_submodule(name).weight: f"{name}.weight".lstrip(".")
        for name in find_sparse(model)
    }
    for group in optimizer.param_groups:
        names = _join([sparse[one] for one in group["params"] if one in sparse])
        if not names:
            continue
        if isinstance(optimizer, SGD) and group.get("momentum"):
            problem = (
                f"the momentum that {kind} keeps of {names} is a sparse tensor, as the gradients "
                "are, and no checkpoint can hold it"
            )
        elif isinstance(optimizer, SGD | Adagrad) and group.get("weight_decay"):
            problem = f"{kind} takes no weight decay for {names}, whose gradients are sparse"
        elif type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
            optimizer, SGD | Adagrad | SparseAdam
        ):
            problem = f"{kind} takes no sparse gradients, and those of {names} are"
        else:
            continue
        return (
            f"optimizer(): {problem}: use SGD or Adagrad without momentum and weight decay, "
            "SparseAdam, or nn.Embedding(sparse=False)"
        )
    return None


def find_scheduler_problem(scheduler: object) -> str | None:
    """Why the training loop cannot use a scheduler; None if it can."""
    kind = type(scheduler).__name__
    if scheduler is None:
        return None
    if isinstance(scheduler, ReduceLROnPlateau) or (
        isinstance(scheduler, LRScheduler) and _needs_arguments(scheduler.step)
    ):
        return (
            f"scheduler(): {kind}.step() needs a measured value, and the loop calls it after each "
            "step without one: use a scheduler that follows from the step, train.schedule, or "
            "train.earlyStop"
        )
    if not isinstance(scheduler, LRScheduler):
        return f"scheduler(): returns a {kind}, and the loop takes a torch LRScheduler or None"
    return None


def find_model_problem(model: nn.Module) -> str | None:
    """Why the training loop cannot train a model, whatever the strategy; None if it can."""
    for name, one in model.named_modules():
        kind = type(one)
        if (
            kind.get_extra_state is not nn.Module.get_extra_state
            and kind.set_extra_state is nn.Module.set_extra_state
        ):
            return (
                f"model(): {name or 'the model'} ({kind.__name__}) has get_extra_state and no "
                "set_extra_state, so that what it saves cannot be given back: write both"
            )
    parameters = dict(model.named_parameters())
    if not parameters:
        return "model(): the model has no parameters, so that there is nothing to train"
    if not any(one.requires_grad for one in parameters.values()):
        return (
            f"model(): all {len(parameters)} parameters are frozen (requires_grad is False), so "
            "that there is nothing to train: leave at least one with requires_grad = True"
        )
    return None


def find_sparse(model: nn.Module) -> list[str]:
    """Names of the embeddings whose gradients are sparse."""
    return [
        name
        for name, one in model.named_modules()
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse
    ]


def check_model(model: nn.Module, workload: Workload, *, strategy: str) -> None:
    """Raise `ConfigError` if a strategy cannot train a model."""
    problem = find_model_problem(model)
    sparse = find_sparse(model)
    if problem is None and sparse and strategy not in ("ddp", "data_parallel"):
        problem = (
            f"train.strategy {strategy} splits gradients between ranks, and those of "
            f"{_join(sparse)} are sparse: use nn.Embedding(sparse=False), or strategy ddp"
        )
    refuse(problem, workload)


def check_end(scheduler: LRScheduler, *, steps: int) -> None:
    """Raise `ConfigError` if a scheduler cannot be stepped to the end of the run."""
    for part in _parts(scheduler):
        total = getattr(part, "total_steps", None)
        if isinstance(total, int) and total < steps:
            raise ConfigError(
                f"{type(part).__name__} has rates for {total} steps, and the run ends at step "
                f"{steps}: make it in scheduler() with total_steps=steps, which the loop gives, "
                f"or set train.steps: {total}"
            )


def describe_scheduler(scheduler: LRScheduler | None) -> str:
    """The class of a scheduler, as a checkpoint names it."""
    if scheduler is None:
        return ""
    kind = type(scheduler)
    return f"{kind.__module__}.{kind.__qualname__}"


def check_saved_scheduler(scheduler: LRScheduler, saved: Sequence[Any]) -> None:
    """Raise `CheckpointMismatchError` if what a checkpoint has of a scheduler (the state, and in
    newer ones the class) is of another class than the job's present one, or of a run of another
    length.
    """
    state, kind = saved[0], saved[1] if len(saved) > 1 else ""
    now = describe_scheduler(scheduler)
    if kind and kind != now:
        raise CheckpointMismatchError(
            f"the checkpoint has the state of the scheduler {kind}, and the job's is {now} now: "
            "their states do not mix; go back to the former one, start again with --fresh, or "
            "begin a new run with these weights (train.init)"
        )
    if isinstance(scheduler, LrSchedule) or not isinstance(state, Mapping):
        return  # it follows from the step alone
    for path, before, after in _moved(state, scheduler.state_dict()):
        raise CheckpointMismatchError(
            f"the scheduler {type(scheduler).__name__} is bound to the length of the run: its "
            f"{path} was {before} when the checkpoint was saved and is {after} now, and the rates "
            "of both do not fit together; set train.steps or train.epochs as before, use "
            "train.schedule, which can be edited, or begin a new run with these weights "
            "(train.init)"
        )


def _moved(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What follows from the length of the run and differs, with its path."""
    for key, after in own.items():
        before = saved.get(key)
        if key.lstrip("_") in _LENGTHS:
            if key in saved and _values(before) != _values(after):
                yield key, _values(before), _values(after)
        elif key == "_schedulers" and isinstance(before, list) and isinstance(after, list):
            for number, (one, other) in enumerate(zip(before, after, strict=False)):
                if isinstance(one, Mapping) and isinstance(other, Mapping):
                    for path, first, second in _moved(one, other):
                        yield f"{key}[{number}].{path}", first, second


def _values(value: Any) -> Any:
    return sorted(value) if isinstance(value, Mapping | list | tuple) else value


def _parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it chains."""
    yield scheduler
    for one in getattr(scheduler, "_schedulers", ()):
        if isinstance(one, LRScheduler):
            yield from _parts(one)


def _needs_arguments(function: Any) -> bool:
    """Whether a method cannot be called without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in parameters
    )


def _join(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def refuse(problem: str | None, workload: Workload) -> None:
    """Raise `ConfigError` if there is a problem."""
    if problem is not None:
        raise ConfigError(f"{type(workload).__name__}.{problem}" if "(): " in problem else problem)


_SAMPLES = 4
_TOLERANCE = 1e-4
_FIX = (
    "return the loss summed over the batch and how many terms it sums, "
    'such as `cross_entropy(…, reduction="sum"), len(labels)`'
)


def split(workload: Workload, returned: Any) -> tuple[Tensor, int]:
    """Split the return value of `loss` into the loss and the count. Raises `ConfigError` if it is
    something else.
    """
    if isinstance(returned, Sequence) and len(returned) == 2 and isinstance(returned[0], Tensor):
        loss, count = returned
        if isinstance(count, Tensor) and count.numel() == 1:
            count = int(count)
        if isinstance(count, int):
            return loss, count
    what = f"a {type(returned).__name__}"
    if isinstance(returned, Sequence):
        what = f"({', '.join(type(one).__name__ for one in returned)})"
    raise ConfigError(
        f"{type(workload).__name__}.loss must return (Tensor, int), and returned {what}: {_FIX}"
    )


def check_loss(workload: Workload, loss: Tensor, count: int, samples: int) -> None:
    """Raise `ConfigError` if the loss is not a scalar, or its `count` of terms contradicts
    `units_per_sample`. A batch without samples is a stand-in, whose count is not checked.
    """
    name, units = type(workload).__name__, workload.units_per_sample
    if loss.ndim != 0:
        raise ConfigError(
            f"{name}.loss must return the sum over the batch, a scalar; its shape is "
            f"{tuple(loss.shape)}: {_FIX}"
        )
    if units is not None and samples and count != units * samples:
        raise ConfigError(
            f"{name}.loss counted {count} terms in {samples} samples, where "
            f"units_per_sample says {units * samples}: "
            "set units_per_sample, or to None where the count depends on the data"
        )


@torch.no_grad()
def reject_mean(
    workload: Workload,
    module: nn.Module,
    batch: Any,
    samples: int,
    *,
    on_all_ranks: Callable[[bool], bool] = lambda own: own,
) -> None:
    """Raise `ConfigError` if the loss is a mean: compare that of a few samples with that of the
    same samples twice; a sum doubles, a mean does not.

    Nothing is checked where this cannot be decided: batches whose samples cannot be selected, a
    loss of 0, a model that is random in eval mode, code that only works in train mode.

    `on_all_ranks` returns whether a condition holds on all ranks: the forward pass of a sharded
    model is collective, so all ranks skip the check if one must.
    """
    few = min(samples, _SAMPLES)
    pair: tuple[Any, Any] | None = None
    with suppress(_NotIndexableError):
        pair = _select(batch, samples, list(range(few))), _select(batch, samples, [*range(few)] * 2)
    if not on_all_ranks(samples > 0 and pair is not None) or pair is None:
        return
    with eval_mode(module):
        try:
            single, double = (split(workload, workload.loss(module, one)) for one in pair)
        except Exception:  # noqa: BLE001 - a loss that only works in training is not checked
            return
    once, count = float(single[0]), single[1]
    twice, double_count = float(double[0]), double[1]
    if not math.isfinite(once) or once == 0 or count == 0 or double_count != 2 * count:
        return
    if abs(twice - once) <= _TOLERANCE * abs(once):
        raise ConfigError(
            f"{type(workload).__name__}.loss seems to return a mean: {once:.6g} for {count} terms, "
            f"and {twice:.6g} for the same terms twice. The loop itself divides by the number of "
            f"terms in the whole step; {_FIX}"
        )


class _NotIndexableError(Exception):
    """Not every part of the batch has one entry for each sample."""


def _select(batch: Any, samples: int, indices: list[int]) -> Any:
    """Select samples of a batch whose tensors have one row per sample. Raises
    `_NotIndexableError` for other batches.
    """
    if isinstance(batch, Tensor):
        if batch.ndim == 0 or len(batch) != samples:
            raise _NotIndexableError
        return batch[torch.tensor(indices, device=batch.device)]
    if isinstance(batch, dict):
        return {key: _select(value, samples, indices) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        selected = [_select(value, samples, indices) for value in batch]
        return type(batch)(*selected) if hasattr(batch, "_fields") else type(batch)(selected)
    raise _NotIndexableError
