"""Values that can be written as an expression are the same on the ranks; others are refused."""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import enum
import functools
import inspect
import logging
import math
import pathlib
import re
from typing import Any

import pytest
import torch

import kdist
from kdist.api import values
from tests.cli.api.conftest import Cells, folder, output, refusal
from tests.house.tree import ROOT

MADE = """
import collections, dataclasses, enum, functools, logging, math, re, pathlib
import torch
from torch import nn

Point = collections.namedtuple("Point", "x y", defaults=[pathlib.Path("z")])

@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    sizes: tuple = ()

class Color(enum.Enum):
    RED = 1

def add(a, b):
    return a + b
"""


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("float('inf')", "float('inf')"),
        ("torch.float32", "torch.float32"),
        ("torch.device('cuda', 1)", "torch.device('cuda:1')"),
        ("pathlib.Path('data')", "pathlib.Path('data')"),
        ("pathlib.PurePosixPath('/a')", "pathlib.PurePosixPath('/a')"),
        ("re.compile('a+', re.I)", "re.compile('a+', 34)"),
        ("logging.getLogger('a.b')", "logging.getLogger('a.b')"),
        ("functools.partial(math.hypot, 3.0)", "functools.partial(math.hypot, 3.0)"),
        ("functools.partial(add, b=[1])", "functools.partial(add, b=[1])"),
        ("Settings(rate=float('-inf'))", "Settings(rate=float('-inf'), sizes=())"),
        ("Point(1)", "Point(1, pathlib.Path('z'))"),
        ("Color.RED", "Color.RED"),
        ("{'a': [1, pathlib.Path('b')], 2: ...}", "{'a': [1, pathlib.Path('b')], 2: Ellipsis}"),
        ("({torch.int8}, frozenset([1]))", "(set([torch.int8]), frozenset([1]))"),
        ("{'b', 'a', ('c',)}", "set(['a', 'b', ('c',)])"),
        ("[nn.Linear, len]", "[torch.nn.modules.linear.Linear, builtins.len]"),
        ("range(3)", "range(0, 3)"),
    ],
)
def test_what_can_be_written_as_an_expression_is_written_down(
    cell: Cells, value: str, written: str
) -> None:
    names = cell(f"{MADE}\nvalue = {value}\ndef train(given):\n    return value, given\n")
    job = kdist.from_code(names["train"], args={"given": names["value"]})
    text = (folder(job) / "run_train.py").read_text()
    assert f"\nvalue = {written}\n" in text
    assert f"train(**{{'given': {written}}})" in text
    again: dict[str, object] = {"__name__": "again"}
    exec(compile(text, "", "exec", dont_inherit=True), again)  # noqa: S102 - as a rank does
    shown, expected = (re.sub(" at 0x.*?>", "", repr(each["value"])) for each in (again, names))
    assert shown == expected


def test_values_of_the_notebooks_classes_run(cell: Cells) -> None:
    names = cell(
        MADE.replace("import torch\nfrom torch import nn", "")
        + "best = float('inf')\nsettings = Settings(best)\n"
        "half = functools.partial(add, b=Color.RED)\n"
        "def train(given):\n    print(settings, half.keywords, given, Point(1))\n"
    )
    job = kdist.from_code(names["train"], args={"given": {"at": names["Point"](1, 2)}})
    assert output(job) == (
        "Settings(rate=inf, sizes=()) {'b': <Color.RED: 1>} {'at': Point(x=1, y=2)} "
        "Point(x=1, y=PosixPath('z'))\n"
    )


@dataclasses.dataclass
class Sizes:
    """Made by its fields."""

    width: int


class Color(enum.Enum):
    """With one member."""

    RED = 1


Pair = collections.namedtuple("Pair", "x y")
SAID = {
    "numbers": (1, 2.5),
    "strings": ("a", b"a"),
    "collections": ([1], (1,), {1: 2}, {1}, frozenset({1}), range(3)),
    "`torch.float32`": (torch.float32,),
    '`torch.device("cuda")`': (torch.device("cuda"),),
    '`Path("data")`': (pathlib.Path("data"), pathlib.PureWindowsPath("data")),
    '`float("inf")`': (float("inf"),),
    '`re.compile("a+")`': (re.compile("a+"),),
    "loggers": (logging.getLogger("a"),),
    "members of an enum": (Color.RED,),
    "`functools.partial`": (functools.partial(math.hypot, 3.0),),
    "named tuples": (Pair(1, 2),),
    "dataclasses": (Sizes(1),),
}
"""What the page says that is written down, and values of it."""
NAMED = (Sizes, math.hypot, re.sub, re)
"""Functions, classes and modules, of which the page has other sentences."""


def test_the_page_names_each_kind_of_value_that_is_written_down() -> None:
    page = (ROOT / "docs/how-to/python.md").read_text()
    (told,) = re.findall("can be written as Python source are written down: (.+?);", page)
    assert re.split(", | and ", told) == [*SAID]
    samples = [*NAMED, *(each for found in SAID.values() for each in found)]
    assert [each for each in samples if not values.write(each, repr)] == []
    (function,) = ast.parse(inspect.getsource(values._write)).body
    assert isinstance(function, ast.FunctionDef)
    known = {**vars(builtins), **vars(values)}
    for each in (each for part in function.body for each in ast.walk(part)):
        name = ast.unparse(each) if isinstance(each, ast.Name | ast.Attribute) else ""
        kind: Any = known.get(name.partition(".")[0])
        for part in name.split(".")[1:]:
            kind = getattr(kind, part, None)
        if isinstance(kind, type) and not issubclass(kind, Exception):
            assert any(isinstance(sample, kind) for sample in samples), f"the page lacks {kind}"
    (of_torch,) = re.findall(r"kind\.__name__ in (\{.*?\})", ast.unparse(function))
    kinds = {type(each) for each in samples if type(each).__module__ == "torch"}
    assert ast.literal_eval(of_torch) == {kind.__name__ for kind in kinds}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("nn.CrossEntropyLoss()", ""),
        ("Settings(rate=object())", ".rate"),
        ("Point(1, object())", "[1]"),
        ("functools.partial(add, b=object())", ".b"),
        ("lambda: 1", ""),
        ("{'a': add, 'b': {1: torch.zeros(1)}}", "['b'][1]"),
    ],
)
def test_what_cannot_be_written_is_refused_with_its_place(
    cell: Cells, value: str, place: str
) -> None:
    names = cell(f"{MADE}\nvalue = {value}\ndef train():\n    return value\n")
    message = str(refusal(names))
    assert message.startswith(f"`value{place}`, which `train` uses, is in the memory")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("lambda: 1", "write it as `def NAME(…):`"),
        ("torch.zeros(1).numpy()", "give float(…), int(…) or .tolist() of it"),
        ("collections.defaultdict(int)", "give dict(…) of it, or make it inside the function"),
        ("datetime.datetime(2000, 1, 1)", "give its text, from which the function makes it: "),
        ("kdist.load(JOB)", "make it inside the function, or in a function that it calls"),
    ],
)
def test_a_value_that_is_refused_says_what_to_give_instead(
    cell: Cells, value: str, hint: str
) -> None:
    job = {"apiVersion": "kdist.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}}
    job["spec"] = {"script": {"path": "a.py"}, "image": "r/i:1"}
    names = cell(
        f"{MADE}\nimport datetime, kdist\nJOB = {job}\nvalue = {value}\n"
        "def train():\n    return value\n"
    )
    error = refusal(names)
    assert error.hint.startswith(hint)
    assert str(error).startswith("`value`, which `train` uses, is in the memory")


def test_an_instance_that_its_fields_do_not_make_is_refused(cell: Cells) -> None:
    names = cell(f"{MADE}\nvalue = Settings()\nvalue.more = 1\ndef train():\n    return value\n")
    assert re.search(r"`value`, which .* \(__main__.Settings\)", str(refusal(names)))


def test_a_default_value_that_contains_itself_is_refused(cell: Cells) -> None:
    cell("rates = []\nrates.append(rates)\ndef train(given=rates):\n    print(given)\n")
    assert "`rates` has changed since `train` was defined" in str(refusal(cell("rates = 1\n")))
