"""The state of a module and an optimizer is read as it is, and loaded whole or not at all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kdist_trainer import state
from kdist_trainer.errors import ConfigError
from kdist_trainer.state import BufferNames, StateMismatchError, ValueKind


class Net(nn.Module):
    """A frozen part that a pass moves, extra state, a buffer that begins as None, one that is
    registered in a pass and one that grows.
    """

    late: Tensor | None
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(3, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.passes = 0
        self.register_buffer("late", None)
        self.register_buffer("queue", torch.zeros(0))

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "sum": torch.tensor(float(self.passes))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.passes = int(state["passes"])

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.data.mul_(0.9).add_(new.data, alpha=0.1)
        self.late = torch.ones(2) * self.passes
        if not hasattr(self, "found"):
            self.register_buffer("found", inputs.detach().mean(0))
        self.queue = torch.cat([self.queue, inputs.detach().mean().view(1)])
        moved = self.student(inputs) - self.teacher(inputs) * (self.late.sum() / 9)
        return self.norm(moved)  # type: ignore[no-any-return]


MADE = ("found", "queue")


def compile_(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def plain() -> nn.Module:
    return Net()


def compiled() -> Any:
    return compile_(Net())


def compiled_part() -> nn.Module:
    model = Net()
    model.student = compile_(model.student)
    return model


def tied() -> nn.Module:
    first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
    last.weight = first.weight
    return nn.Sequential(first, last)


def with_gradient(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = with_gradient(model)
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": others, "lr": np.float64(0.1), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, amsgrad=True)


def momentum_for_some(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = with_gradient(model)
    groups: list[dict[str, Any]] = [{"params": [first], "momentum": 0.9}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1)


def stateless(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(with_gradient(model), lr=0.1)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(with_gradient(model), lr=0.01, max_iter=2, history_size=2)


class Counting(torch.optim.Optimizer):
    """Counts in its groups, of which a step makes one entry, and keeps a text, a row and what is of
    no parameter.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        shared: Any = self.state
        shared.setdefault("all", {"seen": 0})["seen"] += 1
        for group in self.param_groups:
            group["k"] += 1
            group["d"] = group.get("d", 0.5) * 1.5
            for each in group["params"]:
                if each.grad is None or each.ndim < 2:
                    continue
                own = self.state[each]
                own.setdefault("row", torch.zeros(each.shape[0], dtype=torch.float64))
                own["row"] += each.grad.square().mean(1)
                own["kind"] = "factored"
                own["nested"] = {"steps": own.get("nested", {"steps": 0})["steps"] + 1}
                scale = own["row"].sqrt().add(1e-3).to(each.dtype)
                each.data.sub_(each.grad / scale[:, None] * group["lr"] * group["d"])
        return loss


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return Counting(with_gradient(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(inputs).square().sum()  # noqa: B023 - called in this step
            loss.backward()
            return loss

        optimizer.step(closure)


def read_like(found: dict[str, Any], template: dict[str, Any]) -> None:
    """Fill a template by flat names, as a checkpoint's reader does."""
    saved = {name: value for name, (_, value) in state.flatten(found).items()}
    empty = state.flatten(template)
    assert empty.keys() == saved.keys()
    for name, (path, value) in empty.items():
        if isinstance(value, Tensor):
            assert state.kind_of(value) == state.kind_of(saved[name]), name
            value.detach().copy_(saved[name])
        else:
            state.put(template, path, copy.deepcopy(saved[name]))


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    ours, theirs = state.flatten(one), state.flatten(other)
    assert ours.keys() == theirs.keys()
    for name, (_, value) in ours.items():
        found = theirs[name][1]
        assert type(value) is type(found), name
        same = torch.equal(value, found) if isinstance(value, Tensor) else value == found
        assert same, name


@pytest.mark.parametrize(
    ("model_of", "optimizer_of"),
    [
        *((plain, one) for one in (adamw, momentum_for_some, stateless, lbfgs, counting)),
        (compiled, momentum_for_some),
        (compiled_part, adamw),
        (tied, counting),
    ],
)
@pytest.mark.sampled
def test_a_new_process_continues_with_what_another_has_saved(
    model_of: Callable[[], nn.Module],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    sender, receiver = model_of(), model_of()
    sending, receiving = optimizer_of(sender), optimizer_of(receiver)
    train(sender, sending)
    saved = state.read_state(sender, sending)
    described = json.loads(json.dumps(state.describe(saved)))
    kinds = {name: ValueKind(*one) for name, one in described.items()}
    made = MADE if model_of is not tied else ()
    before = copy.deepcopy(state.read_state(receiver, receiving))
    empty = state.template(receiver, receiving, kinds, buffers=BufferNames(made=made))
    assert_equal(state.read_state(receiver, receiving), before)
    read_like(saved, empty)
    state.load_state(receiver, receiving, empty, buffers=BufferNames(made=made))
    assert_equal(state.read_state(receiver, receiving), state.read_state(sender, sending))
    for model, optimizer in ((sender, sending), (receiver, receiving)):
        train(model, optimizer)
    assert_equal(state.read_state(receiver, receiving), state.read_state(sender, sending))


def test_names_are_those_of_the_module_before_it_was_wrapped() -> None:
    names = set(state.read_module(plain()))
    for wrapped in (
        compiled(),
        compiled_part(),
        nn.DataParallel(Net()),
        nn.DataParallel(compiled()),
    ):
        assert set(state.read_module(wrapped)) == names
        assert set(state.parameter_names(wrapped).values()) < names
    holder = nn.ModuleDict({"module": nn.DataParallel(nn.ModuleDict({"module": nn.Linear(2, 2)}))})
    assert set(state.read_module(holder)) == {"module.module.weight", "module.module.bias"}
    both = state.parameter_names({"one": nn.Linear(2, 2), "two": compiled()})
    assert {"one.weight", "two.student.weight"} < set(both.values())


def test_what_a_plain_model_has_saved_is_loaded_into_a_compiled_one_and_back() -> None:
    for one, other in ((plain(), compiled()), (compiled_part(), plain())):
        theirs = adamw(one)
        train(one, theirs)
        mine = adamw(other)
        saved = copy.deepcopy(state.read_state(one, theirs))
        state.load_state(other, mine, saved, buffers=BufferNames(made=MADE))
        assert_equal(state.read_state(other, mine), state.read_state(one, theirs))


def test_reading_takes_no_step_and_makes_no_state() -> None:
    model = plain()
    optimizer = counting(model)
    found = state.read_state(model, optimizer)["optimizer"]
    assert found["state"] == {}
    assert found["param_groups"][0]["k"] == 0
    assert not optimizer.state


def test_states_keep_their_types_and_numbers_of_numpy_become_pythons() -> None:
    model, other = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).bfloat16()
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters())
    theirs.param_groups[0]["lr"] = np.float64(0.1)
    theirs.state[other.weight]["average"] = torch.full((2, 2), 1.001)
    found = state.read_state(other, theirs)
    assert type(found["optimizer"]["param_groups"][0]["lr"]) is float
    state.load_state(model, ours, found)
    assert torch.equal(ours.state[model.weight]["average"], torch.full((2, 2), 1.001))
    assert ours.param_groups[0]["lr"] == 0.1


def test_states_keep_what_torch_would_take_apart_also_deep_inside() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters())
    kept = {
        "history": np.arange(3),
        "rounds": {1: (2, "a", b"b"), 2: [torch.ones(2, dtype=torch.int64), "c"]},
        "seen": {"x"},
    }
    theirs.state[other.weight].update(kept)
    state.load_state(model, ours, state.read_state(other, theirs))
    assert state.digest_of(dict(ours.state[model.weight])) == state.digest_of(kept)


def test_a_buffer_becomes_none_where_the_saved_one_was() -> None:
    model, other = plain(), plain()
    model.register_buffer("late", torch.ones(2))
    saved = state.read_module(other)
    with pytest.raises(StateMismatchError, match=r"model\.late is missing"):
        state.load_module(model, saved)
    assert state.absent_buffers(other) == ["late"]
    absent = state.absent_buffers(other)
    state.load_module(model, saved, buffers=BufferNames(absent))
    assert model.late is None


def test_every_difference_is_named_and_nothing_is_loaded() -> None:
    model = plain()
    optimizer = adamw(model)
    train(model, optimizer)
    saved = copy.deepcopy(state.read_state(model, optimizer))
    before = copy.deepcopy(saved)
    weights = saved["model"]
    del weights["norm.bias"], weights["_extra_state"]
    weights["norm.weight"] = torch.zeros(4)
    weights["queue"] = weights["queue"].double()
    weights["more"] = torch.zeros(1)
    group = saved["optimizer"]["param_groups"][1]
    del group["lr"]
    group["params"].remove("norm.bias")
    saved["optimizer"]["state"]["gone"] = {"step": 1}
    for each in saved["model"].values():
        if isinstance(each, Tensor):
            each.zero_()
    with pytest.raises(StateMismatchError) as caught:
        state.load_state(model, optimizer, saved)
    assert sorted(caught.value.problems) == [
        "model._extra_state is missing",
        "model.more is not in the model",
        "model.norm.bias is missing",
        "model.norm.weight is float32[4] instead of float32[3]",
        "model.queue is float64[3] instead of float32[3]",
        "optimizer.param_groups.1.lr is missing",
        "optimizer.param_groups.1.params: norm.bias is missing",
        "optimizer.state.gone is of no parameter of the optimizer",
    ]
    assert_equal(state.read_state(model, optimizer), before)


def test_an_optimizer_of_what_is_not_in_the_model_is_refused() -> None:
    scale = nn.Parameter(torch.ones(3))
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"a parameter of shape \(3,\) that is none of the model"):
        state.read_state(model, torch.optim.SGD([*model.parameters(), scale]))
