"""Ranks of a script that never form a process group are said at the end, and only such ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Run, Start, write_script

ALONE = """
from kdist_trainer import Reporter

with Reporter() as reporter:
    reporter.step(loss=0.5, step=1)
"""
SPAWNS = """
import torch.multiprocessing as processes


def train(number):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.spawn(train, nprocs=1)
"""
pytestmark = [pytest.mark.processes, pytest.mark.sampled]


def read_report(run: Run, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((run.folder(name) / "report.json").read_text())
    return report


def test_two_ranks_that_train_each_by_itself_are_not_called_done_alone(
    start: Start, tmp_path: Path
) -> None:
    run = start("--nodes", "2", write_script(tmp_path, ALONE, "alone.py"))
    printed = run.wait(0) + run.errors()
    words = "none of its 2 ranks has formed a process group with the others"
    assert f"alone is done, but {words}" in printed
    assert "init_process_group()" in printed
    assert read_report(run, "alone")["separateRanks"] == 2
    assert f"alone is done, but {words}" in run.ask("why", "alone")
    assert words in run.ask("report", "alone")


@pytest.mark.parametrize(
    ("script", "nodes"),
    [
        pytest.param(ALONE, 1, id="one rank"),
        pytest.param(
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "dist.destroy_process_group()\n",
            2,
            id="a group, for a moment",
        ),
        pytest.param(SPAWNS, 2, id="processes of the ranks, which are not seen"),
    ],
)
def test_ranks_of_which_it_is_not_known_are_not_said_to_be_separate(
    start: Start, tmp_path: Path, script: str, nodes: int
) -> None:
    run = start("--nodes", str(nodes), write_script(tmp_path, script, "pair.py"))
    printed = run.wait(0) + run.errors()
    assert "pair is done." in printed
    assert "process group" not in printed
    assert read_report(run, "pair")["separateRanks"] is None
