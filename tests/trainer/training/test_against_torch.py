"""The managed loop next to a training loop as one writes it by hand: same losses, same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LinearLR

from kdist_trainer.config import Training
from kdist_trainer.data.loader import fetcher
from kdist_trainer.data.sampler import Order
from kdist_trainer.numerics.rng import WEIGHTS, Generators, derive
from kdist_trainer.workload import WorkloadContext
from tests.trainer.training.tasks import Padded, Small, describe, losses, train_here, weights

QUIET = {"dropout": 0.0}  # dropout is drawn for each shard, which a loop by hand does not have
SGD = {"name": "sgd", "learningRate": 0.1, "momentum": 0.9, "weightDecay": 0.0}


class ByHand:
    """A loop over the whole batch in one process."""

    def __init__(self, document: dict[str, Any], kind: type[Small] = Small) -> None:
        self.settings = Training.model_validate(document["train"])
        workload = kind(WorkloadContext(self.settings.options, seed=self.settings.seed))
        samples = workload.dataset("train")
        self.order = Order(length=len(samples), seed=self.settings.seed)
        self.total = (self.settings.epochs or 0) * len(samples)
        self.fetch = fetcher(workload, samples)
        Generators.all(torch.device("cpu")).seed(derive(self.settings.seed, WEIGHTS))
        self.model = workload.model()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.9
        )
        self.scheduler: Any = None

    def run(self) -> list[float]:
        found = []
        for first in range(0, self.total, self.settings.global_batch):
            last = min(first + self.settings.global_batch, self.total)
            inputs, labels, numbers = self.fetch(self.order.between(first, last), 0)
            self.optimizer.zero_grad()
            loss = self.mean_loss(inputs, labels, numbers)
            loss.backward()  # type: ignore[no-untyped-call]
            if self.settings.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_grad_norm)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            found.append(float(loss.detach()))
        return found

    def mean_loss(self, inputs: Tensor, labels: Tensor, numbers: Tensor) -> Tensor:  # noqa: ARG002
        return functional.cross_entropy(self.model(inputs), labels)


class PaddedByHand(ByHand):
    def mean_loss(self, inputs: Tensor, labels: Tensor, numbers: Tensor) -> Tensor:
        kept = numbers % 3 > 0
        return functional.cross_entropy(self.model(inputs)[kept], labels[kept])


def assert_same(folder: Path, hand: ByHand) -> None:
    expected = hand.run()
    measured = [float.fromhex(loss) for _, loss in sorted(losses(folder).items())]
    assert measured == pytest.approx(expected, rel=1e-4)
    for name, weight in weights(folder).items():
        torch.testing.assert_close(weight, hand.model.state_dict()[name], rtol=1e-3, atol=1e-5)


pytestmark = [pytest.mark.processes, pytest.mark.sampled]


@pytest.mark.parametrize(
    ("size", "more"),
    [(3, {"virtualShards": 4}), (2, {"microBatch": 2, "virtualShards": 3})],
)
def test_losses_and_weights_are_those_of_one_process_over_the_whole_batch(
    tmp_path: Path, size: int, more: dict[str, Any]
) -> None:
    document = describe(options=QUIET, optimizer=SGD, schedule={}, clipGradNorm=None, **more)
    train_here(document, tmp_path, size)
    assert_same(tmp_path, ByHand(document))


def test_a_rank_without_samples_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    # 12, 12, 1
    document = describe(
        options={**QUIET, "length": 25}, optimizer=SGD, schedule={}, clipGradNorm=None, epochs=1
    )
    train_here(document, tmp_path, 3)
    assert_same(tmp_path, ByHand(document))


def test_the_gradient_is_clipped_over_all_micro_batches_and_ranks_together(tmp_path: Path) -> None:
    document = describe(options=QUIET, optimizer=SGD, schedule={}, clipGradNorm=0.05, microBatch=2)
    train_here(document, tmp_path, 2)
    assert_same(tmp_path, ByHand(document))


def test_the_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    schedule = {"name": "linear", "finalRatio": 0.1}
    document = describe(options=QUIET, optimizer=SGD, schedule=schedule, clipGradNorm=None)
    train_here(document, tmp_path, 1)
    hand = ByHand(document)
    # nine steps
    hand.scheduler = LinearLR(hand.optimizer, start_factor=1.0, end_factor=0.1, total_iters=8)
    assert_same(tmp_path, hand)


def test_the_warm_up_of_the_learning_rate_moves_from_the_first_step(tmp_path: Path) -> None:
    document = describe(
        options=QUIET, optimizer=SGD, schedule={"warmupSteps": 3}, clipGradNorm=None
    )
    train_here(document, tmp_path, 1)
    hand = ByHand(document)
    hand.scheduler = LambdaLR(hand.optimizer, lambda step: [0.25, 0.5, 0.75, 1.0][min(step, 3)])
    assert_same(tmp_path, hand)


def test_a_count_that_depends_on_the_data_is_summed_over_ranks_before_it_divides(
    tmp_path: Path,
) -> None:
    workload = f"{Padded.__module__}:Padded"
    document = describe(
        workload=workload, options=QUIET, optimizer=SGD, schedule={}, clipGradNorm=None
    )
    train_here(document, tmp_path, 2)
    assert_same(tmp_path, PaddedByHand(document, Padded))


def test_bf16_trains_close_to_fp32(tmp_path: Path) -> None:
    finals = []
    for precision in ("fp32", "bf16"):
        train_here(describe(options=QUIET, precision=precision, epochs=8), tmp_path / precision, 1)
        finals.append(float.fromhex(list(losses(tmp_path / precision).values())[-1]))
    assert finals[1] == pytest.approx(finals[0], rel=0.05)
    assert finals[1] != finals[0], "bf16 did not reach the forward pass"


def test_fp16_scales_its_loss_and_keeps_the_scale_in_the_checkpoint(tmp_path: Path) -> None:
    train_here(describe(options=QUIET, precision="fp16", epochs=8), tmp_path, 2)
    found = [float.fromhex(loss) for loss in losses(tmp_path).values()]
    assert found[-1] < found[0]
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    saved = json.loads((checkpoint / "state.json").read_text())["state"]["extras"]["precision"]
    assert saved["scale"] > 1
