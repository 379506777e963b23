"""What docs/workloads.md shows is what runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kdist_trainer import workloads
from kdist_trainer.testing import check_workload
from tests.trainer.training.tasks import describe, done, train_here

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/workload"


def test_the_page_on_workloads_shows_the_example_as_it_is() -> None:
    code = (EXAMPLE / "src/wine.py").read_text()
    assert f"```python\n{code}```" in (ROOT / "docs/workloads.md").read_text()


@pytest.mark.processes
def test_the_example_passes_the_kit_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = yaml.safe_load((EXAMPLE / "job.yaml").read_text())["spec"]["train"]
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    check_workload(workloads.load(train["workload"]), options=train["options"])
    train_here(describe(**train, clipGradNorm=None, schedule={}, evaluate="end"), tmp_path, 2)
    assert done(tmp_path)["metrics"]["accuracy"] >= 0.9
