"""What the loop cannot train with is said in kdist's own words before the first step, by a training
and by `check_workload`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import TensorDataset

from kdist_trainer import config
from kdist_trainer.errors import CheckpointMismatchError, ConfigError
from kdist_trainer.testing import check_workload
from kdist_trainer.training.workload_checks import (
    check_end,
    check_model,
    check_saved_scheduler,
    describe_scheduler,
    find_optimizer_problem,
)
from kdist_trainer.workload import Split, Workload, WorkloadContext, build_scheduler
from tests.trainer.training.group import RankFailed
from tests.trainer.training.shapes import (
    ExtraState,
    ForgetfulOptimizer,
    Growing,
    OddNumbers,
    UnsafeExtraState,
)
from tests.trainer.training.tasks import Small, describe, train_here


class SecondOrder(Small):
    """Its optimizer calls the loss itself."""

    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=settings.learning_rate)


class Plateau(Small):
    """Its scheduler needs a measured value."""

    def scheduler(
        self,
        optimizer: Optimizer,
        settings: config.Schedule,  # noqa: ARG002 - the interface
        *,
        steps: int,  # noqa: ARG002
    ) -> LRScheduler:
        return cast(LRScheduler, ReduceLROnPlateau(optimizer))


class Frozen(Small):
    """Nothing is trained."""

    def model(self) -> nn.Module:
        return super().model().requires_grad_(False)


class Ends(Small):
    """Its scheduler ends before the run."""

    def scheduler(
        self,
        optimizer: Optimizer,
        settings: config.Schedule,  # noqa: ARG002 - the interface
        *,
        steps: int,
    ) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps - 1)


class WithoutAux(nn.Sequential):
    """A model whose last part is not called."""

    def forward(self, inputs: Tensor) -> Tensor:
        for name, module in self.named_children():
            inputs = inputs if name == "aux" else module(inputs)
        return inputs


class UnusedPart(Small):
    """A part of its model reaches no loss."""

    def model(self) -> nn.Module:
        model = WithoutAux(*super().model().children())
        model.add_module("aux", nn.Linear(2, 2))
        return model


class FrozenLater(Small):
    """Freezes its last layer in its fourth loss."""

    losses = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        self.losses += torch.is_grad_enabled()
        if self.losses > 4:  # two of them are passes before the first step
            *_, bias = model.parameters()
            bias.requires_grad_(False)
        return super().loss(model, batch)


class SparseWords(Small):
    """An embedding with sparse gradients."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(64, 3))

    def dataset(self, split: Split) -> TensorDataset:
        numbers, *others = super().dataset(split).tensors
        return TensorDataset(numbers.abs().long() % 8, *others)


class SparseSgd(SparseWords):
    """It is trained by SGD with the momentum of option `momentum`."""

    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:  # noqa: ARG002 - the interface
        return SGD(model.parameters(), lr=0.01, momentum=self.context.options.get("momentum", 0.0))


class Undecided(nn.Linear):
    """Gives extra state and takes none."""

    def get_extra_state(self) -> Any:
        return 1


class OneWay(Small):
    """What a part of its model saves cannot be given back."""

    def model(self) -> nn.Module:
        return nn.Sequential(Undecided(16, 3))


KINDS: list[tuple[type[Workload], str, str]] = [
    (SecondOrder, "ddp", r"SecondOrder\.optimizer\(\): LBFGS\.step\(\) computes the loss again"),
    (Plateau, "ddp", r"Plateau\.scheduler\(\): ReduceLROnPlateau\.step\(\) needs a measured value"),
    (Frozen, "ddp", r"Frozen\.model\(\): all 6 parameters are frozen"),
    (Ends, "ddp", "OneCycleLR has rates for 9 steps, and the run ends at step 10"),
    (UnusedPart, "ddp", "no gradient reaches aux.weight, aux.bias, and the ranks average"),
    (FrozenLater, "ddp", "no gradient reaches .*bias any more: with ddp requires_grad cannot"),
    (
        SparseWords,
        "ddp",
        "AdamW takes no sparse gradients, and those of 0.weight are",
    ),
    (SparseWords, "fsdp", "strategy fsdp splits gradients between ranks, and those of 0 are"),
]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "strategy", "printed"),
    KINDS,
    ids=[f"{kind.__name__}-{strategy}" for kind, strategy, _ in KINDS],
)
def test_a_training_says_what_it_cannot_train_with_and_what_to_do(
    kind: type[Workload], strategy: str, printed: str, tmp_path: Path
) -> None:
    document = describe(
        workload=f"{kind.__module__}:{kind.__name__}", strategy=strategy, epochs=None, steps=10
    )
    with pytest.raises(RankFailed, match=f"ConfigError: .*{printed}"):
        train_here(document, tmp_path / "run", 2 if kind in (UnusedPart, FrozenLater) else 1)


@pytest.mark.parametrize(
    ("kind", "printed"),
    [
        (SecondOrder, r"optimizer\(\): LBFGS\.step\(\) computes the loss again"),
        (Plateau, r"scheduler\(\): ReduceLROnPlateau\.step\(\) needs a measured value"),
        (Frozen, r"model\(\): all 6 parameters are frozen"),
        (Ends, r"scheduler\(\): OneCycleLR has rates for 19 steps"),
        (SparseWords, r"optimizer\(\): AdamW takes no sparse gradients, and those of 0.weight are"),
    ],
)
def test_check_workload_says_so_too(kind: type[Workload], printed: str) -> None:
    with pytest.raises(AssertionError, match=printed):
        check_workload(kind)


def optimizer() -> Optimizer:
    return SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_extra_state_that_is_only_given_is_refused() -> None:
    workload = OneWay(WorkloadContext())
    with pytest.raises(ConfigError, match=r"0 \(Undecided\) has get_extra_state"):
        check_model(workload.model(), workload, strategy="ddp")


def test_sparse_gradients_are_refused_where_gradients_are_split_alone() -> None:
    workload = SparseWords(WorkloadContext())
    check_model(workload.model(), workload, strategy="ddp")
    for strategy in ("fsdp", "hsdp", "tensor", "pipeline"):
        with pytest.raises(ConfigError, match=r"nn\.Embedding\(sparse=False\), or strategy ddp"):
            check_model(workload.model(), workload, strategy=strategy)


def test_check_workload_passes_where_sparse_gradients_can_be_trained_and_saved() -> None:
    check_workload(SparseSgd)
    with pytest.raises(AssertionError, match=r"no checkpoint can hold it: use SGD or Adagrad"):
        check_workload(SparseSgd, options={"momentum": 0.9})


def test_check_workload_loads_the_state_of_a_step_as_a_new_process_would() -> None:
    check_workload(ExtraState)
    check_workload(OddNumbers)
    for kind in (ForgetfulOptimizer, UnsafeExtraState, Growing):
        with pytest.raises(AssertionError, match="a new process could not load their state: "):
            check_workload(kind)


@pytest.mark.parametrize(
    ("make", "printed"),
    [
        (lambda them: SGD(them, lr=0.1), None),
        (lambda them: torch.optim.Adagrad(them), None),
        (lambda them: torch.optim.SparseAdam(them), None),
        (lambda them: SGD(them, lr=0.1, momentum=0.9), "no checkpoint can hold it"),
        (lambda them: SGD(them, lr=0.1, weight_decay=0.1), "SGD takes no weight decay for weight"),
        (lambda them: torch.optim.Adagrad(them, weight_decay=0.1), "Adagrad takes no weight decay"),
        (lambda them: torch.optim.RMSprop(them), "RMSprop takes no sparse gradients"),
    ],
)
def test_an_optimizer_is_refused_as_torch_or_a_checkpoint_would(
    make: Callable[[Any], Optimizer], printed: str | None
) -> None:
    """What is said agrees with what a step and its state show."""
    model = nn.Embedding(5, 2, sparse=True)
    made = make(model.parameters())
    found = find_optimizer_problem(made, model)
    assert (found is None) == (printed is None)
    assert printed is None or (found and printed in found)
    try:
        with warnings.catch_warnings(action="ignore"):
            model(torch.tensor([1, 3])).sum().backward()
            made.step()
        held = [one for state in made.state.values() for one in state.values()]
        fits = not any(isinstance(one, Tensor) and one.is_sparse for one in held)
    except RuntimeError:
        fits = False
    assert fits == (printed is None)


def saved(scheduler: LRScheduler) -> tuple[Any, str]:
    return scheduler.state_dict(), describe_scheduler(scheduler)


def test_another_class_of_scheduler_is_refused_by_name() -> None:
    before = saved(StepLR(optimizer(), 3))
    check_saved_scheduler(StepLR(optimizer(), 3), before)
    with pytest.raises(CheckpointMismatchError, match=r"StepLR, and the job's is .*ExponentialLR"):
        check_saved_scheduler(ExponentialLR(optimizer(), 0.9), before)
    check_saved_scheduler(ExponentialLR(optimizer(), 0.9), before[:1])  # it does not say its class


def one_cycle(steps: int) -> LRScheduler:
    return OneCycleLR(optimizer(), max_lr=0.1, total_steps=steps)


def chained(steps: int) -> LRScheduler:
    parameters = optimizer()
    parts = [LinearLR(parameters, total_iters=5), CosineAnnealingLR(parameters, T_max=steps - 5)]
    return SequentialLR(parameters, parts, milestones=[5])


def halves(steps: int) -> LRScheduler:
    return MultiStepLR(optimizer(), [steps // 2, steps])


@pytest.mark.parametrize(
    ("make", "printed"),
    [
        (one_cycle, "OneCycleLR is bound to the length of the run: its total_steps was 20 when"),
        (
            chained,
            r"its _schedulers\[1\]\.T_max was 15 when the checkpoint was saved and is 25 now",
        ),
        (halves, r"its milestones was \[10, 20\] .* and is \[15, 30\] now"),
    ],
    ids=["OneCycleLR", "SequentialLR", "MultiStepLR"],
)
def test_an_end_that_moves_is_refused_where_the_scheduler_is_bound_to_it(
    make: Any, printed: str
) -> None:
    check_saved_scheduler(make(20), saved(make(20)))
    with pytest.raises(CheckpointMismatchError, match=printed):
        check_saved_scheduler(make(30), saved(make(20)))


def test_the_jobs_own_schedule_follows_an_end_that_moves() -> None:
    settings = config.Schedule(name="cosine")
    before = build_scheduler(optimizer(), settings, steps=20)
    after = build_scheduler(optimizer(), settings, steps=30)
    assert before is not None
    assert after is not None
    check_saved_scheduler(after, saved(before))


def test_rates_must_last_to_the_end() -> None:
    check_end(one_cycle(20), steps=20)
    with pytest.raises(ConfigError, match=r"set train\.steps: 20"):
        check_end(one_cycle(20), steps=21)
    check_end(StepLR(optimizer(), 3), steps=1000)


class WithOneCycle(Small):
    """Its scheduler is bound to the length of the run."""

    def scheduler(
        self,
        optimizer: Optimizer,
        settings: config.Schedule,  # noqa: ARG002 - the interface
        *,
        steps: int,
    ) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


@pytest.mark.processes
def test_a_job_whose_end_was_moved_is_refused_before_it_trains(tmp_path: Path) -> None:
    def document(steps: int, **section: Any) -> dict[str, Any]:
        kind = f"{__name__}:{WithOneCycle.__name__}"
        return describe(workload=kind, epochs=None, steps=steps, **section)

    assert train_here(document(3), tmp_path / "run", 1) == ["done"]
    with pytest.raises(RankFailed, match=r"its total_steps was 3 when .* and is 6 now"):
        train_here(document(6), tmp_path / "run", 1, generation=2)
