"""What is said of a state before its first checkpoint counts is what a process of its own finds
when it loads that checkpoint, in every shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint import writer
from kdist_trainer.checkpoint.manifest import UnloadableStateError
from kdist_trainer.checkpoint.reader import copy_value
from kdist_trainer.checkpoint.writer import LoadableCheck
from kdist_trainer.workload import Workload
from tests.trainer.training.group import RankFailed, run_group
from tests.trainer.training.shapes import LOADABLE, NOT_LOADABLE, Growing, StubbornScheduler
from tests.trainer.training.tasks import describe, train

pytestmark = pytest.mark.processes

STEPS = 4


def document_of(kind: type[Workload], steps: int) -> dict[str, Any]:
    return describe(
        workload=f"{kind.__module__}:{kind.__name__}",
        epochs=None,
        steps=steps,
        schedule={"name": "constant", "warmupSteps": 0},
        checkpoint={"every": {"steps": 2}, "mode": "blocking"},
    )


def predict(document: dict[str, Any], folder: Path) -> list[str]:
    """Train, save whatever is said of it, and return what is said."""
    said: list[str] = []

    def check(self: LoadableCheck, state: Any) -> None:
        assert self.prove is not None
        said.extend(self.prove(state, {}))

    def copy(value: Any, path: str) -> Any:
        try:
            return copy_value(value, path)
        except UnloadableStateError as error:
            said.append(str(error))
            return value

    LoadableCheck.check = check  # type: ignore[method-assign]
    vars(writer)["copy_value"] = copy
    train(document, folder)
    return said


def run(function: Any, document: dict[str, Any], folder: Path, generation: int) -> Any:
    folder.mkdir(exist_ok=True)
    environment = {
        "KDIST_CHECKPOINTS": str(folder / "checkpoints"),
        "KDIST_GENERATION": str(generation),
    }
    return run_group(function, 1, document, folder, environment=environment)[0]


@pytest.mark.chaos
@pytest.mark.sampled
@pytest.mark.parametrize("kind", [*LOADABLE, *NOT_LOADABLE], ids=lambda kind: kind.__name__)
def test_what_is_said_is_what_a_new_process_finds(kind: type[Workload], tmp_path: Path) -> None:
    said = run(predict, document_of(kind, STEPS), tmp_path / "run", 1)
    try:
        found = run(train, document_of(kind, 2 * STEPS), tmp_path / "run", 2)
    except RankFailed as error:
        found = str(error)
    if kind in NOT_LOADABLE:
        assert NOT_LOADABLE[kind] in said[0]
        assert found != "done"
    else:
        assert (said, found) == ([], "done")


@pytest.mark.parametrize(
    ("kind", "strategy"), [(Growing, "ddp"), (Growing, "fsdp"), (StubbornScheduler, "ddp")]
)
def test_a_state_that_cannot_be_loaded_ends_the_run_by_name(
    kind: type[Workload], strategy: str, tmp_path: Path
) -> None:
    document = document_of(kind, 20)
    document["train"]["strategy"] = strategy
    with pytest.raises(RankFailed, match="UnloadableStateError") as caught:
        run(train, document, tmp_path / "run", 1)
    assert NOT_LOADABLE[kind] in str(caught.value)
    assert not list((tmp_path / "run/checkpoints").glob("step-*-e1"))
