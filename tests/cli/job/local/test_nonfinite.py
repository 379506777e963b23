"""A script whose loss becomes NaN: it is said at once, in the last line and in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Kdist
from tests.cli.running import Start, write_script

SCRIPT = """
from kdist_trainer import Reporter

with Reporter() as reporter:
    for step in range(1, 21):
        reporter.step(loss=float("nan") if step > 11 else 1 / step, step=step)
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_a_script_whose_loss_is_nan_to_its_end_is_not_called_done_alone(
    start: Start, tmp_path: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(write_script(tmp_path, SCRIPT, "train.py"))
    printed = run.wait(0) + run.errors()
    assert "the loss of step 12 is nan" in printed
    assert "train is done, but its loss was NaN or infinite in 9 reported steps" in printed
    report = json.loads((run.folder("train") / "report.json").read_text())
    assert report["nonFiniteLoss"] == {"steps": 9, "last": "nan"}
    assert report["loss"] is None
    monkeypatch.setenv("KDIST_HOME", str(run.home / "runs"))
    found = "NaN or infinite in 9 reported steps, and is nan at the end"
    assert f"loss {found}" in " ".join(kdist("report", "train").stdout.split())
    assert f"done, but its loss was {found}" in " ".join(kdist("why", "train").stdout.split())
    report = json.loads(kdist("report", "train", "-o", "json").stdout)
    assert report["nonFiniteLoss"] == {"steps": 9, "last": "nan"}
