"""Profiles on request: the steps that were asked for, on the ranks that were, and nothing left
behind in the loop.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdist_trainer.profiling import __main__ as ask
from kdist_trainer.profiling import requests as requests
from kdist_trainer.workload import WorkloadContext
from tests.trainer.training.tasks import Small, describe, done, train_here


class Asking(Small):
    """Asks for a profile of itself on rank 1, while it computes a loss. Options: at_loss, steps,
    ranks.
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.losses = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        self.losses += torch.is_grad_enabled()
        if self.losses == self.context.options["at_loss"] and os.environ["RANK"] == "1":
            options = self.context.options
            scratch = Path(os.environ["KDIST_SCRATCH"])
            found = requests.write_request(
                scratch, steps=options["steps"], ranks=tuple(options["ranks"])
            )
            (scratch.parent / "asked").write_text(found.name)
        return super().loss(model, batch)


def profiled(tmp_path: Path, *, steps: int = 3, ranks: tuple[int, ...] = ()) -> dict[str, Any]:
    """What has come of the request of a training on two ranks."""
    options = {"at_loss": 5, "steps": steps, "ranks": list(ranks)}
    section: dict[str, Any] = {
        "workload": f"{Asking.__module__}:Asking",
        "options": options,
        "syncEverySteps": 2,
        "virtualShards": 2,
    }
    train_here(describe(**section, epochs=6), tmp_path, 2)
    return requests.read_progress(tmp_path / "checkpoints", (tmp_path / "asked").read_text())


@pytest.mark.sampled
@pytest.mark.processes
def test_all_ranks_record_the_same_steps_and_the_training_does_not_notice(tmp_path: Path) -> None:
    found = profiled(tmp_path / "asked")
    plan = found["plan"]
    assert plan["ranks"] == [0, 1]
    assert plan["last"] - plan["first"] == 2
    assert {(one["first"], one["last"]) for one in found["ranks"].values()} == {
        (plan["first"], plan["last"])
    }
    name = (tmp_path / "asked/asked").read_text()
    for rank in (0, 1):
        path = requests.folder_of(tmp_path / "asked/checkpoints", name) / requests.trace_name(rank)
        trace = json.loads(gzip.decompress(path.read_bytes()))
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert sum(each == "aten::cross_entropy_loss" for each in names) == 3, (
            "one loss in each of the three steps"
        )
        assert "gloo:all_reduce" in names
        summary = found["ranks"][str(rank)]
        assert 0 < summary["communicationSeconds"] < summary["seconds"]
        assert summary["operations"]
        assert not (tmp_path / f"asked/scratch-{rank}/profile-request.json").exists()
    train_here(describe(epochs=6, virtualShards=2), tmp_path / "plain", 2)
    assert done(tmp_path / "asked")["weights"] == done(tmp_path / "plain")["weights"]


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
def test_only_chosen_ranks_record_and_no_further_than_the_run_goes(tmp_path: Path) -> None:
    found = profiled(tmp_path, steps=900, ranks=(1,))
    assert found["plan"]["ranks"] == [1]
    assert list(found["ranks"]) == ["1"]
    assert found["plan"]["last"] == found["ranks"]["1"]["last"] == done(tmp_path)["step"]


def test_a_request_is_taken_once_and_rubbish_is_none(tmp_path: Path) -> None:
    asked = requests.write_request(tmp_path, steps=4, ranks=(0, 2))
    inbox = requests.inbox(tmp_path)
    assert requests.take(inbox) == asked
    assert requests.take(inbox) is None
    for text in (
        "",
        "[]",
        '{"steps": 1}',
        '{"steps": 1, "ranks": [], "name": "../up"}',
        '{"steps": "x", "ranks": 3, "name": "a"}',
    ):
        inbox.write_text(text)
        assert requests.take(inbox) is None, text
        assert not inbox.exists()


def test_old_answers_go_and_the_newest_stay(tmp_path: Path) -> None:
    for number in range(7):
        one = requests.ProfileRequest(f"r{number}", 1)
        requests.write_plan(tmp_path, one, ranks=[0], first=1, last=1)
        os.utime(requests.folder_of(tmp_path, one.name), (number, number))
    expected = ["r2", "r3", "r4", "r5", "r6"]
    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == expected


def test_the_command_asks_looks_and_sends(tmp_path: Path, capfdbinary: Any) -> None:
    place = ["--scratch", str(tmp_path), "--root", str(tmp_path / "nowhere")]
    assert ask.main(["ask", *place, "--steps", "2", "--ranks", "0,3"]) == 0
    name = json.loads(capfdbinary.readouterr().out)["name"]
    assert requests.take(requests.inbox(tmp_path)) == requests.ProfileRequest(name, 2, (0, 3))
    assert ask.main(["look", *place, "--name", name]) == 0
    assert json.loads(capfdbinary.readouterr().out) == {"plan": {}, "ranks": {}}
    assert ask.main(["send", *place, "--name", name, "--rank", "3"]) == 74
    folder = requests.folder_of(tmp_path, name)
    folder.mkdir(parents=True)
    (folder / requests.trace_name(3)).write_bytes(b"\x1f\x8b trace")
    capfdbinary.readouterr()
    assert ask.main(["send", *place, "--name", name, "--rank", "3"]) == 0
    assert capfdbinary.readouterr().out == b"\x1f\x8b trace"
