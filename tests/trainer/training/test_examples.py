"""What docs/reference/workloads.md shows is what runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from kdist_trainer import workloads
from kdist_trainer.testing import check_workload
from tests.trainer.training.tasks import describe, done, train_here

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/workload"


@pytest.mark.parametrize("file", sorted((EXAMPLE / "src").glob("*.py")), ids=lambda path: path.name)
def test_the_page_on_workloads_shows_the_example_as_it_is(file: Path) -> None:
    assert f"```python\n{file.read_text()}```" in (ROOT / "docs/reference/workloads.md").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("file", sorted(EXAMPLE.glob("*.yaml")), ids=lambda path: path.name)
def test_an_example_passes_the_kit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = yaml.safe_load(file.read_text())["spec"]["train"]
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check_workload(
            workloads.load(train["workload"]), options=train["options"], samples=4, steps=5
        )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("file", "metric", "least"),
    [
        ("job.yaml", "accuracy", 0.9),
        pytest.param("image.yaml", "accuracy", 0.9, marks=pytest.mark.chaos),
    ],
)
def test_an_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, metric: str, least: float
) -> None:
    train = yaml.safe_load((EXAMPLE / file).read_text())["spec"]["train"]
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    train_here(
        describe(**{**train, "clipGradNorm": None, "schedule": {}, "evaluate": "end"}), tmp_path, 2
    )
    assert done(tmp_path)["metrics"][metric] >= least
