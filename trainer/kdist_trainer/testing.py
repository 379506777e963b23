"""A test kit for workloads: checks in one process and a few seconds what the training loop relies
on.

    from kdist_trainer.testing import check_workload
    from my_module import MyWorkload

    def test_my_workload() -> None:
        check_workload(MyWorkload, options={"width": 16})
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from kdist_trainer.checkpoint.writer import fill
from kdist_trainer.config import Optimizer, Schedule
from kdist_trainer.data.loader import fetcher
from kdist_trainer.data.sampler import WeightedOrder
from kdist_trainer.errors import ConfigError, DataError, find_place
from kdist_trainer.numerics.rng import FETCH, STEP, WEIGHTS, Generators, derive
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.parallel.tensor import MIXED, UNMATCHED
from kdist_trainer.state import (
    Attributes,
    BufferNames,
    describe,
    describe_changed,
    load_state,
    read_state,
    template,
)
from kdist_trainer.stream import Stream, StreamSamples
from kdist_trainer.training import workload_checks
from kdist_trainer.workload import Samples, Workload, WorkloadContext

_CPU = torch.device("cpu")


def check_workload(
    workload: type[Workload],
    *,
    options: dict[str, Any] | None = None,
    data: dict[str, Path] | None = None,
    samples: int = 8,
    steps: int = 20,
) -> None:
    """Check that the training loop can train a workload.

    Args:
        workload: The workload's class.
        options: Its options, as in job.yaml.
        data: The folder of each mount path.
        samples: Number of samples of each split that are used.
        steps: Optimizer steps on one batch, which must reduce its loss.

    Raises:
        AssertionError: With every problem that was found.
    """
    context = WorkloadContext(options or {}, data or {}, seed=0)
    checks = _Checks(workload, context, samples=samples, steps=steps)
    problems = [problem for check in checks.all() for problem in check()]
    assert not problems, "\n".join(  # noqa: S101
        [f"the training loop cannot train {workload.__name__}:", *(f"- {one}" for one in problems)]
    )


class _Checks:
    """Each check yields the problems that it finds."""

    def __init__(
        self, kind: type[Workload], context: WorkloadContext, *, samples: int, steps: int
    ) -> None:
        self._kind = kind
        self._context = context
        self._steps = steps
        self._generators = Generators.all(_CPU)
        self.workload = kind(context)
        train = _samples(self.workload.dataset("train"))
        assert train is not None and len(train) >= 2, (  # noqa: S101, PT018
            f"{kind.__name__}.dataset('train') needs at least 2 samples"
        )
        self.train: Samples = train
        self._indices = torch.arange(min(samples, len(train)))

    def all(self) -> list[Callable[[], Iterator[str]]]:
        return [
            self._model_is_reproducible,
            self._optimizer_and_scheduler_are_supported,
            self._samples_are_reproducible,
            self._weights_are_valid,
            self._can_be_pickled,
            self._loss_is_a_sum,
            self._gradients_are_finite,
            self._state_is_kept,
            self._state_can_be_loaded,
            self._evaluation_returns_sums,
            self._plan_names_modules,
            self._loss_decreases,
        ]

    def _make_model(self) -> torch.nn.Module:
        self._generators.seed(derive(self._context.seed, WEIGHTS))
        return self.workload.model()

    def _fetch_batch(
        self, indices: Tensor, samples: Samples | None = None, workload: Workload | None = None
    ) -> Any:
        fetch = fetcher(workload or self.workload, samples if samples is not None else self.train)
        return fetch(indices, derive(self._context.seed, FETCH))

    def _model_is_reproducible(self) -> Iterator[str]:
        first, second = self._make_model().state_dict(), self._make_model().state_dict()
        different = [name for name in first if not _equal(first[name], second.get(name))]
        if different:
            yield (
                "model(): two calls with the same seed return different weights: "
                f"{', '.join(different[:5])}"
            )

    def _optimizer_and_scheduler_are_supported(self) -> Iterator[str]:
        model = self._make_model()
        if problem := workload_checks.find_model_problem(model):
            yield problem
            return
        optimizer = self.workload.optimizer(model, Optimizer())
        if problem := workload_checks.find_optimizer_problem(optimizer, model):
            yield problem
            return
        scheduler = self.workload.scheduler(optimizer, Schedule(), steps=self._steps)
        if problem := workload_checks.find_scheduler_problem(scheduler):
            yield problem
        elif scheduler is not None:
            try:
                workload_checks.check_end(scheduler, steps=self._steps)
            except ConfigError as error:
                yield f"scheduler(): {error}"

    def _samples_are_reproducible(self) -> Iterator[str]:
        other = self._kind(self._context)
        again = _samples(other.dataset("train"))
        if again is None or len(again) != len(self.train):
            yield "dataset('train'): a second call returns another length"
            return
        if not _equal(
            self._fetch_batch(self._indices), self._fetch_batch(self._indices, again, other)
        ):
            yield (
                "dataset('train'): a second call returns other samples, or draws random "
                "numbers that do not come from the seeded generators"
            )
        if self.workload.fingerprint(self.train) != other.fingerprint(again):
            yield "fingerprint(): two calls differ for the same data"

    def _weights_are_valid(self) -> Iterator[str]:
        weights = self.workload.weights(self.train)
        try:
            if weights is not None:
                WeightedOrder(weights=weights, length=len(self.train), seed=0)
        except DataError as problem:
            yield str(problem)

    def _can_be_pickled(self) -> Iterator[str]:
        try:
            pickle.dump((self.workload, self.train), io.BytesIO())
        except Exception as error:  # noqa: BLE001 - pickle raises anything
            yield (
                "workload or data set cannot be sent to loader processes "
                f"(train.loader.workers): {error}"
            )

    def _compute_loss(self, model: torch.nn.Module, indices: Tensor) -> tuple[Tensor, int]:
        self._generators.seed(derive(self._context.seed, STEP))
        return self.workload.loss(model, self._fetch_batch(indices))

    def _loss_is_a_sum(self) -> Iterator[str]:
        model = self._make_model().eval()
        loss, count = self._compute_loss(model, self._indices)
        if loss.ndim != 0:
            yield f"loss(): must return a scalar, its shape is {tuple(loss.shape)}"
            return
        units = self.workload.units_per_sample
        if units is not None and count != units * len(self._indices):
            yield (
                f"loss(): counts {count} terms in {len(self._indices)} samples; "
                f"units_per_sample says {units} each"
            )
        if units is None and self.workload.count(self._fetch_batch(self._indices)) != count:
            yield "count(): differs from the count that loss() returns"
        half = len(self._indices) // 2
        halves = (self._indices[:half], self._indices[half:])
        losses = [self._compute_loss(model, indices)[0].float() for indices in halves]
        whole = torch.stack(losses).sum()
        if not torch.allclose(loss.float(), whole, rtol=1e-3, atol=1e-4):
            yield (
                "loss(): the losses of two halves do not add up to the whole: return a sum "
                "over samples, not a mean"
            )

    def _gradients_are_finite(self) -> Iterator[str]:
        model = self._make_model().train()
        if workload_checks.find_model_problem(model):
            return  # said before
        loss, _ = self._compute_loss(model, self._indices)
        loss.backward()  # type: ignore[no-untyped-call]
        named = [
            (name, weight) for name, weight in model.named_parameters() if weight.requires_grad
        ]
        without = [name for name, weight in named if weight.grad is None]
        if without:
            yield (
                f"loss(): no gradient reaches {', '.join(without[:5])}: remove these parameters "
                "or set requires_grad = False"
            )
        nonfinite = [
            name
            for name, weight in named
            if weight.grad is not None and not torch.isfinite(_values_of(weight.grad)).all()
        ]
        if nonfinite:
            yield f"loss(): the gradient of {', '.join(nonfinite[:5])} is not finite"

    def _state_is_kept(self) -> Iterator[str]:
        """Check that a pass changes nothing which no checkpoint and no other rank would get."""
        model = self._make_model().train()
        attributes = Attributes(model)
        self._compute_loss(model, self._indices)
        if changed := attributes.restore():
            yield f"model(): a pass changes {describe_changed(changed)}"
        if workload_checks.find_model_problem(model):
            return  # said before
        optimizer = self.workload.optimizer(model, Optimizer())
        if workload_checks.find_optimizer_problem(optimizer, model):
            return
        attributes = Attributes(optimizer)
        optimizer.step()
        if changed := attributes.find_changed():
            what = describe_changed(changed, in_optimizer=True)
            yield f"optimizer(): a step changes {what}"

    def _state_can_be_loaded(self) -> Iterator[str]:
        """Check that a new process could load the state after a step, as a training does where each
        rank holds it whole: strategies that shard find what raises at the first restart.
        """
        model = self._make_model().train()
        if workload_checks.find_model_problem(model):
            return  # said before
        buffers = Buffers(model, None)
        optimizer = self.workload.optimizer(model, Optimizer())
        if workload_checks.find_optimizer_problem(optimizer, model):
            return
        self._compute_loss(model, self._indices)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        saved, changes = read_state(model, optimizer), buffers.state_dict()
        fresh = self._make_model()
        if any(map(is_lazy, fresh.parameters())):
            return  # a training gives them their shape before it loads
        other = self.workload.optimizer(fresh, Optimizer())
        names = BufferNames(changes["absent"], changes["made"])
        try:
            made = template(fresh, other, describe(saved), buffers=names)
            problems = fill(made, saved)
            if not problems:
                load_state(fresh, other, made, buffers=names)
        except Exception as error:  # noqa: BLE001 - of the user's own load_state_dict, set_extra_state …
            place = find_place(error)
            problems = [f"{type(error).__name__}: {error}{f' ({place})' if place else ''}"]
        if problems:
            yield f"model(), optimizer(): a new process could not load their state: {problems[0]}"

    def _evaluation_returns_sums(self) -> Iterator[str]:
        test = self.workload.dataset("test")
        if isinstance(test, Stream):
            yield "dataset('test'): a stream; what is evaluated must have a length"
            return
        if test is None or len(test) == 0:
            return
        model = self._make_model().eval()
        with torch.no_grad():
            measured = self.workload.evaluate(
                model, self._fetch_batch(torch.arange(min(len(self._indices), len(test))), test)
            )
        for name, value in measured.items():
            if not (
                isinstance(value, tuple)
                and len(value) == 2
                and isinstance(value[1], int)
                and value[1] > 0
            ):
                yield f"evaluate(): {name} must be (sum, count) with a positive integer count"
        if not measured:
            yield "evaluate(): measures nothing; return None from dataset('test') instead"

    def _plan_names_modules(self) -> Iterator[str]:
        """Check the plan of strategy `tensor`, if there is one."""
        model = self._make_model()
        plan = self.workload.tensor_plan(model, 1)
        if plan is None:
            return
        named = {
            name: [key for key in plan if _matches(name, key)] for name, _ in model.named_modules()
        }
        unmatched = [key for key in plan if not any(key in keys for keys in named.values())]
        if unmatched:
            yield f"tensor_plan(): {UNMATCHED.format(', '.join(unmatched))}"
        for name, module in model.named_modules():
            own = [weight for weight, _ in module.named_parameters(recurse=False)]
            if own and not named[name] and any(True for _ in module.children()):
                yield f"tensor_plan(): {name or 'the model'} {MIXED.format(own[0])}"

    def _loss_decreases(self) -> Iterator[str]:
        model = self._make_model().train()
        if workload_checks.find_model_problem(model):
            return  # said before
        optimizer = self.workload.optimizer(model, Optimizer())
        if workload_checks.find_optimizer_problem(optimizer, model):
            return
        loss, count = self._compute_loss(model.eval(), self._indices)
        before = float(loss.detach())
        model.train()
        for _ in range(self._steps):
            optimizer.zero_grad()
            loss, _ = self._compute_loss(model, self._indices)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        loss, _ = self._compute_loss(model.eval(), self._indices)
        after = float(loss.detach())
        if not after < before:
            yield (
                f"optimizer(): {self._steps} steps on one batch took its loss from "
                f"{before:.4g} to {after:.4g}"
            )


def _matches(name: str, pattern: str) -> bool:
    """Whether a module's name matches a key of a plan, in which `*` stands for one component."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _samples(found: Samples | Stream | None) -> Samples | None:
    """The samples; a stream as the loop would read it with two samples a step."""
    return StreamSamples(found, batch=2, shards=1, seed=0) if isinstance(found, Stream) else found


def _values_of(gradient: Tensor) -> Tensor:
    """The numbers that a gradient has, which may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _equal(one: Any, other: Any) -> bool:
    """Whether two nested values are bitwise identical."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_equal(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return (
            isinstance(other, list | tuple)
            and len(one) == len(other)
            and all(map(_equal, one, other))
        )
    return bool(one == other)
