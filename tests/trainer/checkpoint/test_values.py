"""What a checkpoint holds comes back with its types, or is refused with its path when it is saved,
and not when it is loaded.
"""

from __future__ import annotations

import enum
import io
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kdist_trainer.checkpoint.manifest import UnloadableStateError, read_state_json, write_state
from kdist_trainer.checkpoint.reader import copy_value, read_value
from tests.trainer.checkpoint.states import open_store

Pair = namedtuple("Pair", "first second")


class Level(enum.IntEnum):
    HIGH = 3


class Colour(enum.Enum):
    RED = 1


class Number(float):
    """A number of a type of the user's own."""


def come_back(value: Any) -> Any:
    """What a new process reads."""
    stream = io.BytesIO()
    torch.save(copy_value(value, "value"), stream)
    stream.seek(0)
    return read_value(stream)


def equal(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types, throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            equal(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return repr(one) == repr(other)


SAME = [
    {1: (2, [3, (4,)]), (5, "six"): {7}, None: True, 2.5: b"x"},
    Counter({3: 1, 5: 2}),
    OrderedDict(a=1j),
    [
        torch.float16,
        torch.device("cpu"),
        torch.Size([2]),
        bytearray(b"y"),
        b"",
        2**70,
        float("nan"),
    ],
    np.arange(6, dtype=np.int16).reshape(2, 3),
    {"names": np.array(["a", "bc"]), "flags": np.array([True, False])},
    (np.array(1.5), np.zeros((0, 3), np.float32)),
    {"tensors": [torch.arange(3).to(torch.bfloat16), {"deep": torch.ones(2)}]},
]


@pytest.mark.parametrize("value", SAME, ids=range(len(SAME)))
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    found = come_back(value)
    assert equal(found, value), f"{found!r} instead of {value!r}"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (Number(1.5), 1.5),
        (Level.HIGH, 3),
        (Counter({np.int64(4): np.int64(1)}), Counter({4: 1})),
        ({np.float64(1.5): [np.float32(2)]}, {1.5: [2.0]}),
    ],
    ids=repr,
)
def test_numbers_of_other_types_become_pythons_own(value: Any, plain: Any) -> None:
    found = come_back(value)
    assert equal(found, plain), f"{found!r} instead of {plain!r}"


def test_overlapping_memory_is_copied() -> None:
    assert equal(come_back([torch.ones(1).expand(4)]), [torch.ones(4)])


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
REFUSED: list[tuple[Any, str]] = [
    ({"rules": [0, len]}, r"value\['rules'\]\[1\] is a builtin_function_or_method"),
    ({"f": lambda step: step}, r"value\['f'\] is a function"),
    ((Pair(1, 2),), r"value\[0\] is a .*Pair"),
    ({"a": defaultdict(int)}, r"value\['a'\] is a collections.defaultdict"),
    ({Colour.RED: 1}, r"value has a key of type .*Colour"),
    ({"a": {frozenset([1]): 2}}, r"value\['a'\] has a key of type frozenset"),
    (frozenset([1]), "value is a frozenset"),
    (np.array([None, 1]), "value is a NumPy array of object"),
    (np.array(["2020"], dtype="datetime64[Y]"), "value is a NumPy array of datetime64"),
    (np.datetime64("2020"), "value is a datetime"),
    (np.longdouble(1), "value is a numpy.longdouble"),
    (range(3), "value is a range"),
    ("\ud800", "half of a UTF-16 pair"),
    (CYCLE, "or holds itself"),
    (torch.Generator(), "value is a torch._C.Generator"),
]


@pytest.mark.parametrize(("value", "printed"), REFUSED, ids=[one[1] for one in REFUSED])
def test_what_could_not_be_read_is_refused_with_its_path(value: Any, printed: str) -> None:
    with pytest.raises(UnloadableStateError, match=printed):
        copy_value(value, "value")


@pytest.mark.parametrize(
    ("tensor", "printed"),
    [
        (torch.ones(2).to_sparse(), "optimizer.a is a tensor that is sparse_coo"),
        (torch.empty(2, device="meta"), "optimizer.a is a tensor that has no content"),
    ],
    ids=["sparse", "meta"],
)
def test_a_tensor_that_could_not_be_read_is_refused_with_its_name(
    tensor: torch.Tensor, printed: str, tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    with pytest.raises(UnloadableStateError, match=printed):
        store.save({"optimizer": {"a": tensor}}, {}, step=1)


JSON = [
    {"rounds": {1: (2, 3), None: [True]}, "$tuple": 1, "other": {"$items": {}}},
    {"best": [(0.5, "a"), {(1, 2): {}}], "nan": float("inf")},
    {"plain": [1, {"a": None}]},
]


@pytest.mark.parametrize("state", JSON, ids=range(len(JSON)))
def test_the_state_of_a_script_comes_back_with_its_types(state: dict[str, Any]) -> None:
    found, job = read_state_json(write_state(state, {"name": "a"}))
    assert equal(found, state), f"{found!r} instead of {state!r}"
    assert job == {"name": "a"}


def test_numbers_in_the_state_of_a_script_become_pythons_own() -> None:
    found, _ = read_state_json(
        write_state({"a": np.float32(0.5), "b": {np.int64(1): Level.HIGH}}, {})
    )
    assert equal(found, {"a": 0.5, "b": {1: 3}})


def test_what_the_state_of_a_script_cannot_hold_is_refused_with_its_path() -> None:
    with pytest.raises(UnloadableStateError, match=r"state\['a'\]\[0\] is a torch.Tensor"):
        write_state({"a": [torch.ones(1)]}, {})
