"""Values that can be written as an expression are the same on the ranks; others are refused."""

from __future__ import annotations

import re

import pytest

import kdist
from tests.cli.api.conftest import Cells, folder, output, refusal

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


def test_an_instance_that_its_fields_do_not_make_is_refused(cell: Cells) -> None:
    names = cell(f"{MADE}\nvalue = Settings()\nvalue.more = 1\ndef train():\n    return value\n")
    assert re.search(r"`value`, which .* \(__main__.Settings\)", str(refusal(names)))


def test_a_default_value_that_contains_itself_is_refused(cell: Cells) -> None:
    cell("rates = []\nrates.append(rates)\ndef train(given=rates):\n    print(given)\n")
    assert "`rates` has changed since `train` was defined" in str(refusal(cell("rates = 1\n")))
