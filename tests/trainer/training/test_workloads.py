"""The shipped workloads, how a user's is found, and the kit that checks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from kdist_trainer import config, workloads
from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.testing import check_workload
from kdist_trainer.workload import Samples, Split, Sums, Workload, WorkloadContext
from kdist_trainer.workloads.digits import Digits, read_scans
from kdist_trainer.workloads.gpt import Gpt, read_corpus
from tests.trainer.training.tasks import Padded, Small, describe, done, train_here

TINY = {"layers": 1, "width": 16, "heads": 2, "block": 16, "corpusBytes": 4096}


@pytest.mark.parametrize(("name", "options"), [("digits", {"width": 4}), ("gpt", TINY)])
def test_every_shipped_workload_passes_the_kit(name: str, options: dict[str, Any]) -> None:
    check_workload(workloads.load(name), options=options)


def test_the_parametrised_names_are_all_there_are() -> None:
    assert workloads.shipped() == ["digits", "gpt"]


@pytest.mark.parametrize("kind", [Small, Padded])
def test_the_kit_passes_workloads_that_train(kind: type[Workload]) -> None:
    check_workload(kind, steps=60)


class Mean(Small):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        return loss / count, count


class Unreached(Small):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("spare", nn.Parameter(torch.zeros(2)))
        return model


class Miscounted(Small):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return super().loss(model, batch)[0], 1


class Stuck(Small):
    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> torch.optim.Optimizer:  # noqa: ARG002
        return torch.optim.SGD(model.parameters(), lr=0.0)


class Shifting(Small):
    calls = 0

    def dataset(self, split: Split) -> Any:
        Shifting.calls += 1
        self.context.options["length"] = 40 + Shifting.calls
        return super().dataset(split)


class Unsummed(Small):
    def evaluate(self, model: nn.Module, batch: Any) -> Sums:  # noqa: ARG002
        return {"loss": 1.0}  # type: ignore[dict-item]


class Rooted(Small):
    def dataset(self, split: Split) -> Samples:  # type: ignore[override]
        samples = super().dataset(split)
        samples.open = lambda: None  # type: ignore[attr-defined]
        return samples


class Misspelt(Small):
    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:  # noqa: ARG002
        return {"0": ColwiseParallel(), "*": ColwiseParallel(), "layers.0": ColwiseParallel()}


class Mixed(Small):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("shift", nn.Parameter(torch.zeros(3)))
        model.register_forward_hook(lambda module, _, scores: scores + module.shift)
        return model

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:  # noqa: ARG002
        return {"0": ColwiseParallel()}


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Misspelt, r"tensor_plan\(\): names layers.0, and the model has no such part"),
        (Mixed, r"tensor_plan\(\): the model has weights of its own \(shift\)"),
        (Mean, "do not add up"),
        (Unreached, "no gradient reaches spare"),
        (Miscounted, "counts 1 terms in 8 samples"),
        (Stuck, "20 steps on one batch"),
        (Shifting, "another length"),
        (Unsummed, "loss must be \\(sum, count\\)"),
        (Rooted, "cannot be sent to loader processes"),
    ],
)
def test_the_kit_names_what_the_loop_could_not_work_with(
    kind: type[Workload], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_workload(kind)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("digit", "no workload 'digit', did you mean 'digits'"),
        ("nope", "there are: digits, gpt"),
        ("no_such_module_here:Class", "no module 'no_such_module_here'"),
        ("tests.nowhere:Class", "no module 'tests.nowhere'"),
        (f"{__name__}:Miscount", "no class 'Miscount', did you mean 'Miscounted'"),
        (f"{__name__}:TINY", "is not a class derived from"),
        (f"{__name__}:Path", "is not a class derived from"),
        ("kdist_trainer.workload:Workload", "lacks dataset, loss, model"),
    ],
)
def test_a_workload_that_is_not_there_is_refused_with_the_nearest_name(
    name: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        workloads.load(name)


def test_a_module_that_lacks_one_of_its_own_imports_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfway.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        workloads.load("halfway:Class")


def test_unknown_and_wrong_options_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Digits(WorkloadContext({"width": 0, "widht": 8}))
    assert "train.options.width" in str(caught.value)
    assert "train.options.widht: the workload has no such option, only width, dropout" in str(
        caught.value
    )


def test_digits_are_split_the_same_way_every_time_and_no_scan_is_in_both() -> None:
    digits = Digits(WorkloadContext())
    train, test = digits.dataset("train"), digits.dataset("test")
    assert (len(train), len(test)) == (1437, 360)
    assert (
        digits.fingerprint(train)
        == Digits(WorkloadContext()).fingerprint(digits.dataset("train"))
        != digits.fingerprint(test)
    )
    counts = torch.bincount(test.tensors[1], minlength=10)
    assert counts.min() >= 25, "every digit is in the test split"


def test_digits_are_those_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    images, labels = read_scans()
    pixels, targets = load_digits(return_X_y=True)
    assert torch.equal(images.flatten(1) * 16, torch.from_numpy(pixels).float())
    assert torch.equal(labels, torch.from_numpy(targets).long())


def test_the_text_of_gpt_is_cut_into_neighbouring_windows() -> None:
    gpt = Gpt(WorkloadContext(TINY))
    train, test = gpt.dataset("train"), gpt.dataset("test")
    assert len(train.text) + len(test.text) == 4096
    assert torch.equal(train[0][1:], train.fetch(torch.tensor([0]))[0][1:])
    assert train[0][-1] == train[1][0], "a window's last byte is the next one's first"
    assert len(train) == (len(train.text) - 1) // 16


def test_the_text_is_the_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, content in (
        ("b.py", "b" * 600),
        ("a/z.py", "z" * 600),
        ("a.py", "a" * 600),
        ("c.txt", "c" * 600),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    text = bytes(read_corpus(tmp_path, 1500).tolist())
    assert text == b"a" * 600 + b"z" * 600 + b"b" * 300


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 bytes"):
        read_corpus(tmp_path, 4096)


@pytest.mark.processes
def test_an_evaluation_counts_every_test_sample_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    found = []
    for size in (1, 2, 3):
        document = describe(
            workload="digits",
            options={"width": 2},
            steps=1,
            epochs=None,
            evaluate="end",
            virtualShards=3,
        )
        train_here(document, tmp_path / str(size), size)
        found.append(done(tmp_path / str(size))["metrics"])
    assert found[0]["accuracy"] * 360 == pytest.approx(round(found[0]["accuracy"] * 360), abs=1e-9)
    assert all(one["loss"] == pytest.approx(found[0]["loss"], rel=1e-3) for one in found)


@pytest.mark.processes
def test_gpt_learns_its_text_and_reports_bits_per_byte(tmp_path: Path) -> None:
    options = {"layers": 1, "width": 32, "heads": 2, "block": 32, "corpusBytes": 65536}
    document = describe(
        workload="gpt",
        options=options,
        steps=60,
        epochs=None,
        globalBatch=32,
        evaluate="end",
        schedule={},
    )
    train_here(document, tmp_path, 2)
    metrics = done(tmp_path)["metrics"]
    assert metrics["bits_per_byte"] < 5, "8 bits are chance"
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / 0.6931472, rel=1e-6)
