"""A pipeline learns what one rank learns, whatever the microbatches; its stages agree; and what
cannot be cut says why.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kdist_trainer import parallel
from kdist_trainer.config import Cause, Training
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError
from kdist_trainer.ipc.failure import read
from kdist_trainer.parallel.pipeline import balance_stages, split_stages
from kdist_trainer.workload import WorkloadContext
from tests.trainer.training.cells import distance, learn
from tests.trainer.training.cells import losses as course
from tests.trainer.training.group import RankFailed, run_group
from tests.trainer.training.tasks import (
    Interrupted,
    Small,
    Wild,
    describe,
    done,
    losses,
    train_here,
)

STAGES: dict[str, Any] = {"strategy": "pipeline", "modelParallel": 2}
PLAIN: dict[str, Any] = {
    "options": {"dropout": 0.0, "depth": 2},
    "optimizer": {"name": "sgd", "learningRate": 0.1},
}


class Normed(Interrupted):
    """Running means besides weights; it can send itself SIGTERM."""

    def model(self) -> nn.Module:
        first, *others = super().model().children()
        return nn.Sequential(first, nn.BatchNorm1d(24), *others)


class Broken(Small):
    """Its second stage raises."""

    def model(self) -> nn.Module:
        class Last(nn.Linear):
            def forward(self, _: Tensor) -> Tensor:
                raise ValueError("this layer is broken")

        *others, _ = super().model().children()
        return nn.Sequential(*others, Last(24, 3))


class Silent(Small):
    """Its loss never calls the model."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:  # noqa: ARG002 - on purpose
        return torch.zeros((), requires_grad=True), len(batch[0])


@given(loads=st.lists(st.integers(0, 9), min_size=1, max_size=8), stages=st.integers(1, 4))
def test_the_heaviest_stage_is_as_light_as_can_be(loads: list[int], stages: int) -> None:
    if sum(load > 0 for load in loads) < stages:
        return
    found = balance_stages(loads, stages)
    assert (found[0], found[-1], len(found)) == (0, len(loads), stages + 1)

    def heaviest(cuts: list[int]) -> float:
        weights = [sum(loads[one:other]) for one, other in pairwise(cuts)]
        return max(weights) if min(weights) else float("inf")

    every = (
        [0, *between, len(loads)] for between in combinations(range(1, len(loads)), stages - 1)
    )
    assert heaviest(found) == min(heaviest(cuts) for cuts in every)


def test_a_model_that_cannot_be_cut_says_why() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(
        ConfigError, match="chain has 2 parts with weights, which cannot make 3 stages"
    ):
        split_stages(model, list(model), 3)
    with pytest.raises(ConfigError, match="a workload whose `chain` names its parts"):
        split_stages(model, (), 2)
    with pytest.raises(ConfigError, match=r"2\.weight is in no part"):
        split_stages(model, [model[0]], 1)
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"0\.weight is used by two stages"):
        split_stages(model, list(model), 2)


def hold(ways: int, folder: Path) -> list[str]:
    """Names of the weights that this rank holds."""
    train = Training.model_validate(
        {"workload": "small", "steps": 1, "strategy": "pipeline", "modelParallel": ways}
    )
    workload = Small(WorkloadContext({"depth": 3}))
    with World.from_environment(timeout_seconds=60, model_parallel=ways) as world:
        model = workload.model()
        parallel.build(train, workload, world).wrap(model, workload.chain(model))
        assert sorted(model.state_dict()) == sorted(name for name, _ in model.named_parameters())
        return [name for name, _ in model.named_parameters()]


@pytest.mark.processes
def test_each_rank_holds_its_stage_only_under_the_names_of_the_whole_model(tmp_path: Path) -> None:
    whole = [name for name, _ in Small(WorkloadContext({"depth": 3})).model().named_parameters()]
    one, two, three, four = run_group(hold, 4, 2, tmp_path)
    assert (one, two) == (three, four)
    assert one
    assert two
    assert one + two == whole


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.chaos)])
def test_uneven_microbatches_clipping_and_a_short_last_step_change_nothing(
    size: int, tmp_path: Path
) -> None:
    section = {**PLAIN, "evaluate": "end", "emaDecay": 0.9, "virtualShards": 2, "globalBatch": 13}
    train_here(describe(**section), tmp_path / "one", 1)
    train_here(
        describe(**section, **STAGES, pipeline={"schedule": "1f1b", "microbatches": 4}),
        tmp_path / "stages",
        size,
    )
    assert distance(course(tmp_path / "stages"), course(tmp_path / "one")) <= 1e-5
    assert done(tmp_path / "stages")["metrics"]["loss"] == pytest.approx(
        done(tmp_path / "one")["metrics"]["loss"], rel=1e-5
    )


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
def test_both_schedules_and_a_resume_end_with_the_same_bits(tmp_path: Path) -> None:
    task = f"{__name__}:Normed"
    calm = {"workload": task, "options": {"at_loss": -1, "on_rank": -1}}
    for schedule in ("1f1b", "gpipe"):
        section = {**calm, **STAGES, "pipeline": {"schedule": schedule, "microbatches": 2}}
        train_here(describe(**section), tmp_path / schedule, 4)
    torn = {
        "workload": task,
        "options": {"at_loss": 20, "on_rank": 3},
        **STAGES,
        "pipeline": {"microbatches": 2},
    }
    assert train_here(describe(**torn, syncEverySteps=1), tmp_path / "torn", 4) == ["stopped"] * 4
    train_here(
        describe(**calm, **STAGES, pipeline={"microbatches": 2}), tmp_path / "torn", 4, generation=2
    )
    ends = [done(tmp_path / name)["weights"] for name in ("1f1b", "gpipe", "torn")]
    assert ends[0]
    assert ends == [ends[0]] * 3
    assert 1 < min(losses(tmp_path / "torn", generation=2)) < 9


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.parametrize(
    "section",
    [{"compile": "aot_eager"}, {"activationCheckpointing": "blocks"}],
    ids=lambda one: next(iter(one)),
)
def test_stages_are_compiled_and_computed_twice_like_a_whole_model(
    section: dict[str, Any], tmp_path: Path
) -> None:
    plain = learn(tmp_path / "plain", 2, "gpt", "pipeline", "fp32", steps=5)
    assert (
        distance(learn(tmp_path / "other", 2, "gpt", "pipeline", "fp32", steps=5, **section), plain)
        <= 1e-6
    )


@pytest.mark.processes
def test_a_wild_step_is_left_out_by_all_stages(tmp_path: Path) -> None:
    section = {**PLAIN, "workload": f"{Wild.__module__}:Wild", "epochs": 1, "onNonfinite": "skip"}
    section["options"] = {**PLAIN["options"], "at_sample": 11}
    train_here(describe(**section), tmp_path / "one", 1)
    train_here(describe(**section, **STAGES), tmp_path / "stages", 2)
    one, stages = losses(tmp_path / "one"), losses(tmp_path / "stages")
    assert [step for step, loss in one.items() if loss == "nan"] == [
        step for step, loss in stages.items() if loss == "nan"
    ]
    for step, loss in one.items():
        if loss != "nan":
            assert float.fromhex(stages[step]) == pytest.approx(float.fromhex(loss), rel=1e-5)


@pytest.mark.processes
def test_an_error_of_a_stage_comes_out_as_it_was_raised(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        train_here(describe(workload=f"{__name__}:Broken", **STAGES), tmp_path, 2)
    failure = read(tmp_path / "scratch-1", 0)
    assert failure is not None
    assert failure.cause == Cause.USER_CODE
    assert "ValueError: this layer is broken" in failure.message


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
def test_a_loss_that_never_calls_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="needs a loss that calls the model"):
        train_here(describe(workload=f"{__name__}:Silent", **STAGES), tmp_path, 2)
