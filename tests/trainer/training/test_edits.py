"""A job that is edited between two runs: the effect of each edit is reported, and edits that are
taken over have an effect.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel
from torch import nn

from kdist_trainer.checkpoint.ledger import read_lines
from kdist_trainer.config import Optimizer, Schedule, Training, edit_rules
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.training import trainer
from kdist_trainer.training.context import TrainContext
from kdist_trainer.workload import (
    LrSchedule,
    WorkloadContext,
    apply_edits,
    build_scheduler,
    lr_factor,
)
from kdist_trainer.workloads.digits import Digits
from tests.faults.check_ledger import assert_every_sample_once
from tests.trainer.training.group import RankFailed, run_group
from tests.trainer.training.tasks import describe, done, losses, train_here
from tests.trainer.training.test_resume import interrupt, train_and_listen

PAGE = Path(__file__).parents[3] / "docs/how-to/training.md"
TABLE = re.compile(r"(<!-- made by config/edit_rules\.py -->\n).*(<!-- end -->\n)", re.DOTALL)


def sections(**edits: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A `train` section as a checkpoint keeps it, and the same after an edit."""
    before = Training.model_validate(describe()["train"], strict=False).model_dump(
        mode="json", by_alias=True
    )
    now = Training.model_validate({**describe()["train"], **edits}, strict=False).model_dump(
        mode="json", by_alias=True
    )
    return before, now


def effects(*, stream: bool = False, **edits: Any) -> dict[str, str]:
    return {
        change.field: change.effect.value
        for change in edit_rules.compare(*sections(**edits), stream=stream)
    }


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Names in job.yaml of all fields; a section that has a rule of its own is one."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        kind = field.annotation
        if path not in edit_rules.RULES and isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields_of(kind, f"{path}.")
        else:
            yield path


def test_every_field_of_the_training_has_its_rule_and_every_rule_its_field() -> None:
    assert sorted(fields_of(Training)) == sorted(edit_rules.RULES)


def test_the_table_in_the_documentation_is_that_of_the_rules() -> None:
    page, rules = PAGE.read_text(), edit_rules.RULES.items()
    assert TABLE.search(page)
    rows = [f"| `{field}` | {rule.effect} | {rule.why} |" for field, rule in rules]
    table = "\n".join(["| field | an edit is | |", "|---|---|---|", *rows]) + "\n"
    fresh = TABLE.sub(lambda found: f"{found[1]}\n{table}\n{found[2]}", page)
    if os.environ.get("KDIST_REGENERATE"):
        PAGE.write_text(fresh)
    assert PAGE.read_text() == fresh
    assert table in fresh


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ({}, {}),
        (
            {"epochs": 3, "loader": {"workers": 2}},
            {"epochs": "taken over", "loader.workers": "free"},
        ),
        (
            {"optimizer": {"name": "sgd"}},
            {"optimizer.name": "refused", "optimizer.learningRate": "taken over"},
        ),
        ({"precision": "bf16"}, {"precision": "taken over"}),
        ({"precision": "bf16-params"}, {"precision": "refused"}),
        ({"emaDecay": 0.9}, {"emaDecay": "refused"}),
        ({"init": {"path": "/data/x"}}, {"init": "needs --fresh"}),
        ({"seed": 4}, {"seed": "refused"}),
    ],
)
def test_an_edit_has_the_effect_of_its_field(
    edits: dict[str, Any], expected: dict[str, str]
) -> None:
    assert effects(**edits) == expected


def test_how_weights_are_fetched_is_free_and_which_ones_needs_a_new_run() -> None:
    init = {"url": "s3://bucket/model", "secret": "first"}
    before, _ = sections(init=init)[::-1]
    _, now = sections(init={**init, "secret": "other", "size": "1Gi", "region": "eu-central-1"})
    found = {one.field: one.effect.value for one in edit_rules.compare(before, now)}
    assert found == dict.fromkeys(["init.region", "init.secret", "init.size"], "free")
    _, now = sections(init={**init, "url": "s3://bucket/other"})
    (only,) = edit_rules.compare(before, now)
    assert (only.field, only.effect.value) == ("init.url", "needs --fresh")


def test_a_stream_does_not_go_on_with_another_batch() -> None:
    assert effects(globalBatch=24) == {"globalBatch": "taken over"}
    assert effects(globalBatch=24, stream=True) == {"globalBatch": "refused"}


@pytest.mark.parametrize(
    ("edits", "continues", "problem"),
    [
        ({}, False, None),
        ({"loader": {"workers": 2}}, False, None),
        ({"epochs": 3}, True, None),
        (
            {"epochs": 1},
            False,
            (
                "the run is done with step 9, after 100 samples, and the job was edited "
                "since: epochs 2 -> 1;"
            ),
        ),
        ({"epochs": None, "steps": 9}, False, "epochs 2 -> none; steps none -> 9"),
        ({"epochs": None, "steps": 10}, True, None),
        ({"clipGradNorm": 2.0}, False, "clipGradNorm 1.0 -> 2.0"),
        ({"epochs": 3, "seed": 4}, False, "seed 3 -> 4: refused"),
    ],
)
def test_a_run_that_has_ended_goes_on_only_where_its_end_moved(
    edits: dict[str, Any], continues: bool, problem: str | None
) -> None:
    before, now = sections(**edits)
    finished = edit_rules.compare_done(
        {"step": 9, "samples_seen": 100, "job": {"train": before}}, {"train": now, "script": None}
    )
    assert finished.continues is continues
    assert finished.problem is None if problem is None else problem in str(finished.problem)
    assert finished.is_complete is (problem is None and not continues)


def test_a_script_that_has_ended_is_not_its_edited_self() -> None:
    job: dict[str, Any] = {"script": {"path": "a.py", "module": None, "args": []}, "train": None}
    assert edit_rules.compare_done({"job": {"script": job["script"]}}, job).is_complete
    edited = {**job, "script": {"path": "a.py", "module": None, "args": ["--lr", "1"]}}
    assert 'script.args [] -> ["--lr", "1"]' in str(
        edit_rules.compare_done({"job": {"script": job["script"]}}, edited).problem
    )


def optimizer_at(rate: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    optimizer.param_groups[0]["initial_lr"] = rate
    return optimizer


def test_the_curve_is_gone_on_from_at_any_step() -> None:
    settings = Schedule(name="cosine", warmup_steps=3)
    walked = build_scheduler(optimizer_at(0.1), settings, steps=20)
    placed = build_scheduler(optimizer_at(0.1), settings, steps=7)
    assert isinstance(walked, LrSchedule)
    assert isinstance(placed, LrSchedule)
    for _ in range(9):
        walked.optimizer.step()
        walked.step()
    placed.seek(9, steps=20)
    for _ in range(3):
        assert placed.optimizer.param_groups[0]["lr"] == walked.optimizer.param_groups[0]["lr"]
        placed.optimizer.step()
        for one in (walked, placed):
            one.step()


def test_a_scheduler_of_the_workloads_own_goes_on_at_the_edited_rate() -> None:
    optimizer = optimizer_at(0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    optimizer.step()
    scheduler.step()
    apply_edits(optimizer, optimizer_at(0.01).param_groups, {"optimizer.learningRate"}, scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    scheduler.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0025)


EDITED = {"momentum": 0.5, "weightDecay": 0.25, "betas": [0.5, 0.75]}
"""Another value of each option of an optimizer that is taken over, besides the learning rate."""


def group_of(name: str, **options: Any) -> torch.optim.Optimizer:
    settings = Optimizer.model_validate({"name": name, **options}, strict=False)
    optimizer = Digits(WorkloadContext()).optimizer(nn.Linear(1, 1), settings)
    optimizer.param_groups[0]["initial_lr"] = settings.learning_rate
    return optimizer


def test_every_option_of_an_optimizer_that_is_taken_over_reaches_its_groups() -> None:
    taken = {
        name.removeprefix("optimizer.")
        for name, rule in edit_rules.RULES.items()
        if name.startswith("optimizer.") and rule.effect is edit_rules.EditEffect.APPLIED
    }
    assert taken == {"learningRate", *EDITED}
    reached = set()
    for name, option in product(get_args(Optimizer.model_fields["name"].annotation), EDITED):
        restored = group_of(name)
        (before,) = [dict(each) for each in restored.param_groups]
        (wanted,) = group_of(name, **{option: EDITED[option]}).param_groups
        changed = {key for key in before if key != "params" and before[key] != wanted[key]}
        apply_edits(restored, [wanted], {f"optimizer.{option}"})
        (now,) = restored.param_groups
        assert {key: now[key] for key in changed} == {key: wanted[key] for key in changed}
        reached |= {option} if changed else set()
    assert reached == EDITED.keys()


def train_and_tell(document: dict[str, Any], folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Train; what the rank logged, and the learning rate of the first step."""
    rates: list[float] = []
    original = trainer.setup

    def setup(ctx: TrainContext) -> None:
        original(ctx)
        rates.append(float(ctx.optimizer.param_groups[0]["lr"]))

    trainer.setup = setup
    return train_and_listen(document, folder), rates[0]


def go_on(folder: Path, **section: Any) -> tuple[list[dict[str, Any]], float]:
    """Go on with one rank; what it logged, and the learning rate of its first step."""
    environment = {"KDIST_CHECKPOINTS": str(folder / "checkpoints"), "KDIST_GENERATION": "2"}
    document = describe(virtualShards=4, **section)
    ((heard, rate),) = run_group(train_and_tell, 1, document, folder, environment=environment)
    return heard, rate


@pytest.mark.processes
@pytest.mark.parametrize("batch", [24, 8])
@pytest.mark.sampled
def test_another_batch_uses_the_remaining_samples_once(tmp_path: Path, batch: int) -> None:
    interrupt(tmp_path, 1, epochs=6)
    at = len(losses(tmp_path))
    go_on(tmp_path, epochs=6, globalBatch=batch)
    assert_every_sample_once(
        read_lines(tmp_path / "checkpoints" / LEDGER / STEPS_FILE), total=6 * 50
    )
    assert done(tmp_path)["samples_seen"] == 300
    assert done(tmp_path)["step"] == at + -(-(300 - at * 12) // batch)


@pytest.mark.processes
@pytest.mark.sampled
def test_steps_stay_steps_with_another_batch(tmp_path: Path) -> None:
    interrupt(tmp_path, 1, epochs=None, steps=20)
    at = len(losses(tmp_path))
    go_on(tmp_path, epochs=None, steps=20, globalBatch=24)
    assert done(tmp_path)["step"] == 20
    assert done(tmp_path)["samples_seen"] == at * 12 + (20 - at) * 24


@pytest.mark.processes
def test_the_edited_rate_and_schedule_hold_from_the_position_on(tmp_path: Path) -> None:
    interrupt(tmp_path, 1, epochs=6)
    at, settings = len(losses(tmp_path)), {"name": "linear", "warmupSteps": 2}
    heard, rate = go_on(
        tmp_path, epochs=6, optimizer={"name": "adamw", "learningRate": 0.5}, schedule=settings
    )
    (reported,) = [event for event in heard if event["event"] == "job-edited"]
    assert reported["fields"] == [
        "workload",
        "options",
        "optimizer.learningRate",
        "schedule.name",
        "schedule.warmupSteps",
    ]
    assert "optimizer.learningRate 0.01 -> 0.5: taken over" in reported["message"]
    assert rate == 0.5 * lr_factor(Schedule(name="linear", warmup_steps=2), steps=25)(at)


@pytest.mark.processes
def test_a_schedule_that_comes_later_begins_at_the_position(tmp_path: Path) -> None:
    interrupt(tmp_path, 1, epochs=6, schedule={"name": "constant"})
    at = len(losses(tmp_path))
    _, rate = go_on(tmp_path, epochs=6, schedule={"name": "linear"})
    assert rate == 0.01 * lr_factor(Schedule(name="linear"), steps=25)(at)


@pytest.mark.processes
def test_an_edit_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    interrupt(tmp_path, 1, epochs=6)
    optimizer = {"name": "sgd", "learningRate": 0.01}
    with pytest.raises(RankFailed, match=r"Mismatch.*spec\.train\.optimizer\.name adamw -> sgd"):
        train_here(
            describe(virtualShards=4, epochs=6, optimizer=optimizer), tmp_path, 1, generation=2
        )


@pytest.mark.processes
def test_a_run_whose_end_was_moved_goes_on_to_the_weights_of_one_that_was_longer_from_the_start(
    tmp_path: Path,
) -> None:
    for folder, lengths in ((tmp_path / "long", (4,)), (tmp_path / "twice", (2, 4))):
        for generation, steps in enumerate(lengths, 1):
            document = describe(epochs=None, steps=steps, schedule={"name": "constant"})
            assert train_here(document, folder, 1, generation=generation) == ["done"]
    assert done(tmp_path / "twice")["weights"] == done(tmp_path / "long")["weights"]
    assert done(tmp_path / "twice")["step"] == 4
