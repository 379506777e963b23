"""What a forward pass changes besides the weights is found by value, whatever the way, and is as it
was where a pass does not count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.data.loader import fetcher
from kdist_trainer.data.sampler import Order
from kdist_trainer.numerics.rng import WEIGHTS, Generators, derive
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.state import describe, digest_of, digests_of, read_module
from kdist_trainer.workload import WorkloadContext
from tests.faults.code.moved import Moved
from tests.trainer.training.tasks import describe as describe_job
from tests.trainer.training.tasks import train_here


class Holder(nn.Module):
    """Something of each kind, and a function that moves some of it."""

    def __init__(self, move: Callable[[Any], None]) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)
        self.register_buffer("nothing", None)
        self.passes = 0
        self._move = move

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "row": torch.full((2,), float(self.passes))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]

    def forward(self, inputs: Tensor) -> Any:
        self._move(self)
        return self.norm(self.fc(inputs))


def by_data(model: Any) -> None:
    model.frozen.data.mul_(0.5)


def by_new_data(model: Any) -> None:
    model.frozen.data = model.frozen.data + 1


def by_numpy(model: Any) -> None:
    model.table.numpy()[1] += 1


def by_inference(model: Any) -> None:
    with torch.inference_mode():
        model.table = model.table + 1


def by_no_grad(model: Any) -> None:
    with torch.no_grad():
        model.fc.weight.clamp_(-0.01, 0.01)


def by_compiled_code(model: Any) -> None:
    def move(table: Tensor) -> None:
        table.add_(1)

    torch.compile(move, backend="eager")(model.table)


def by_growing(model: Any) -> None:
    model.table = torch.cat([model.table, model.table[:1]])


def by_extra_state(model: Any) -> None:
    model.passes += 1


def by_making_one(model: Any) -> None:
    model.nothing = torch.ones(2) if model.nothing is None else model.nothing + 1


def by_registering_one(model: Any) -> None:
    if not hasattr(model, "made"):
        model.register_buffer("made", torch.zeros(1))
    model.made += 1


def by_unsaved(model: Any) -> None:
    model.unsaved = torch.rand(3)


def values(model: nn.Module) -> str:
    """The digest of all that a module holds."""
    unsaved = dict(model.named_buffers())
    return digest_of({**read_module(model), **unsaved})


WAYS = {
    by_data: "frozen",
    by_new_data: "frozen",
    by_numpy: "table",
    by_inference: "table",
    by_no_grad: "fc.weight",
    by_compiled_code: "table",
    by_growing: "table",
    by_extra_state: "_extra_state",
    by_making_one: "nothing",
    by_registering_one: "made",
    by_unsaved: "unsaved",
}


@pytest.mark.parametrize(("move", "name"), WAYS.items(), ids=[one.__name__ for one in WAYS])
def test_what_a_pass_moves_is_found_and_put_back(move: Callable[[Any], None], name: str) -> None:
    model = Holder(move)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1)
    before = values(model)
    buffers = Buffers(model, None, keep_previous=True, with_parameters=True)
    buffers.exclude(optimizer)
    with buffers.detect_changes() as compare:
        for _ in range(2):
            model(torch.randn(4, 2))
            compare()
    assert values(model) == before, "the warm-up has left a trace"
    assert buffers.state_dict()["known"] == [name]
    buffers.track_constants()
    for _ in range(3):
        model(torch.randn(4, 2))
        buffers.synchronize()
        buffers.accept()
    finished = values(model)
    model(torch.randn(4, 2))
    assert values(model) != finished
    buffers.restore()
    assert values(model) == finished, "a step that was given up has left a trace"
    assert buffers.find_moved() == []
    with buffers.preserved():
        model.eval()(torch.randn(4, 2))
    assert values(model) == finished, "an evaluation has left a trace"


@pytest.mark.parametrize("move", [by_making_one, by_registering_one])
def test_the_first_step_that_is_given_up_leaves_no_buffer_that_it_has_made(
    move: Callable[[Any], None],
) -> None:
    for is_sent in (False, True):
        model = Holder(move)
        buffers = Buffers(model, None, keep_previous=True, with_parameters=True)
        with buffers.detect_changes():
            model(torch.randn(4, 2))
        buffers.track_constants()
        before = values(model)
        model(torch.randn(4, 2))
        if is_sent:
            buffers.synchronize()
        buffers.restore()
        assert values(model) == before
        for _ in range(2):
            model(torch.randn(4, 2))
            buffers.synchronize()
            buffers.accept()
            finished = values(model)
            model(torch.randn(4, 2))
            buffers.restore()
            assert values(model) == finished


@pytest.mark.parametrize(("move", "name"), WAYS.items(), ids=[one.__name__ for one in WAYS])
def test_what_begins_to_move_later_is_found_by_its_digest(
    move: Callable[[Any], None], name: str
) -> None:
    model = Holder(lambda _: None)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1)
    buffers = Buffers(model, None, keep_previous=True, with_parameters=True)
    buffers.exclude(optimizer)
    with buffers.detect_changes():
        model(torch.randn(4, 2))
    buffers.track_constants()
    model(torch.randn(4, 2))
    assert buffers.find_moved() == []
    move(model)
    owned = move is by_no_grad
    assert buffers.find_moved() == ([] if owned else [name])
    buffers.synchronize_late()
    assert buffers.find_moved() == []
    assert buffers.state_dict()["known"] == ([] if owned else [name])


def test_a_buffer_that_a_saved_state_lacks_is_removed_before_it_is_restored() -> None:
    model = Holder(by_registering_one)
    buffers = Buffers(model, None, keep_previous=True, with_parameters=True)
    saved = set(read_module(model))
    model(torch.randn(4, 2))
    assert buffers.remove_made(saved | {"nothing"}) == {"made"}
    assert set(read_module(model)) == saved


def test_a_flag_that_toggles_twice_is_found() -> None:
    def toggle(model: Any) -> None:
        model.table.neg_()

    model = Holder(toggle)
    buffers = Buffers(model, None, keep_previous=True, with_parameters=True)
    with buffers.detect_changes() as compare:
        for _ in range(2):
            model(torch.randn(4, 2))
            compare()
    assert buffers.state_dict()["known"] == ["table"]


@pytest.mark.processes
def test_the_first_step_is_that_of_plain_torch_to_the_bit(tmp_path: Path) -> None:
    options = {"moves": "everything", "states": "some", "compiled": "plain", "pause": 0, "late": 9}
    job = describe_job(
        workload="tests.faults.code.moved:Moved",
        options=options,
        steps=1,
        epochs=None,
        globalBatch=24,
        virtualShards=1,
        clipGradNorm=None,
        schedule={"name": "constant"},
    )
    train_here(job, tmp_path, 1)
    workload = Moved(WorkloadContext(options, seed=3))
    samples = workload.dataset("train")
    Generators.all(torch.device("cpu")).seed(derive(3, WEIGHTS))
    model = workload.model()
    optimizer = workload.optimizer(model, None)
    batch = fetcher(workload, samples)(Order(length=len(samples), seed=3).between(0, 24), 0)
    loss, count = workload.loss(model, batch)
    (loss * (1 / count)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    expected = {"model": read_module(model)}
    newest = Lock(tmp_path / "checkpoints").find_newest()
    assert newest is not None
    assert isinstance(newest.path, Path)
    saved = FileSystemReader(newest.path).read_metadata().state_dict_metadata
    assert {one for one in saved if one.startswith("model.")} == describe(expected).keys()
    found = copy.deepcopy(expected)
    for value in found["model"].values():
        if isinstance(value, Tensor):
            value.detach().zero_()
    load(found, checkpoint_id=newest.path, no_dist=True)
    ours, theirs = digests_of(found), digests_of(expected)
    assert {name for name, one in theirs.items() if ours[name] != one} == set()
