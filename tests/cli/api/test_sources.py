"""Source is found wherever a notebook keeps it, and does what the notebook has, or is refused."""

from __future__ import annotations

import ast
import linecache
import sys

import pytest

import kdist
from tests.cli.api.conftest import Cells, folder, on_ranks, refusal


def test_default_values_are_those_of_the_definition(cell: Cells) -> None:
    cell("N = 3\ndef train(x=N, *, y=N * 2, z=1 << 3, w=(1, 2)):\n    print(x, y, z, w, N)\n")
    names = cell("N = 99\n")
    assert on_ranks(names) == "3 6 8 (1, 2) 99\n"


def test_fields_of_a_class_and_defaults_of_methods_are_those_of_the_definition(
    cell: Cells,
) -> None:
    cell(
        "from dataclasses import dataclass, field\nN = 3\n"
        "@dataclass\nclass Settings:\n    rate: int = N\n"
        "    sizes: list = field(default_factory=list)\n"
        "    def scale(self, by=N): return by\n"
    )
    names = cell("N = 99\ndef train():\n    print(Settings(), Settings().scale())\n")
    assert on_ranks(names) == "Settings(rate=3, sizes=[]) 3\n"


def test_what_was_written_stays_as_it_was_written(cell: Cells) -> None:
    names = cell("import math\nN = 3\ndef train(x=N, y=math.pi):  # the reason\n    print(x, y)\n")
    text = (folder(kdist.from_code(names["train"])) / "run_train.py").read_text()
    assert "def train(x=N, y=math.pi):  # the reason" in text


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (
            "held = 1",
            "`held` has changed since `read` was defined, and `x` of `read` still has the old",
        ),
        ("read.__defaults__ = None", "the default values of `read` were changed after it was"),
    ],
)
def test_a_default_value_that_cannot_be_sent_is_refused(
    cell: Cells, later: str, message: str
) -> None:
    cell("held = object()\ndef read(x=held):\n    print(x)\ndef train():\n    read()\n")
    error = refusal(cell(later))
    assert message in str(error)
    assert error.hint == "define `read` again"


MODEL = """
class Base:
    pass
class Model(Base):
    steps = 1
    sizes = [1]
    cache = {}
    made = 0
    def __init__(self):
        Model.made += 1
    def run(self):
        return self.steps
    @staticmethod
    def name():
        return "model"
    class Part:
        size = 1
        def __repr__(self):
            return "part"
def train():
    print(Model().run(), Model.name(), Model.Part())
"""


@pytest.mark.parametrize(
    ("later", "changed"),
    [
        ("Model.steps = 2", "steps"),
        ("Model.steps = object()", "steps"),
        ("Model.sizes.append(2)", "sizes"),
        ("Model.extra = 3", "extra"),
        ("Model.Part.size = 2", "Part.size"),
        ("def run(self):\n    return 9\nModel.run = run", "run"),
        ("def more(self):\n    return 9\nModel.more = more", "more"),
    ],
)
def test_a_class_that_was_changed_after_its_definition_is_refused(
    cell: Cells, later: str, changed: str
) -> None:
    names = cell(MODEL)
    names = cell("Model()\nModel.cache['a'] = 1\n")  # as a class may change itself
    assert on_ranks(names) == "1 model part\n"
    error = refusal(cell(later))
    assert str(error) == f"`Model.{changed}` was changed after the class was defined"
    assert error.hint == "make the change in the cell that defines the class"


@pytest.mark.parametrize(
    ("method", "is_noticed"),
    [
        ("def __init__(self):\n        self.rate = 3", True),
        ("def run(self):\n        rate = 3\n        import os as rate", True),
        ("class Inner:\n        rate = 3", True),
        ("@classmethod\n    def grow(cls):\n        cls.rate = 3", False),
        ("def grow(self):\n        type(self).rate = 3", False),
    ],
)
def test_a_changed_field_is_noticed_where_only_instances_and_functions_have_its_name(
    cell: Cells, method: str, is_noticed: bool
) -> None:
    cell(f"class Settings:\n    rate = 1\n    {method}\n")
    names = cell("def train():\n    print(Settings.rate)\n")
    assert on_ranks(names) == "1\n"
    names = cell("Settings.rate = 7\n")
    if is_noticed:
        assert str(refusal(names)) == "`Settings.rate` was changed after the class was defined"
    else:
        assert on_ranks(names) == "1\n"


def test_what_decorators_and_bases_make_of_a_class_is_no_change(cell: Cells) -> None:
    names = cell("""
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import total_ordering
from typing import NamedTuple, Protocol

def wrap(of):
    def method(self):
        return 5
    of.run = method
    of.more = 1
    return of

@wrap
class Wrapped:
    def run(self):
        return 1

class Registered:
    known = []
    def __init_subclass__(cls):
        cls.name = cls.__name__

class One(Registered):
    pass

class Color(Enum):
    RED = 1

class Level(IntEnum):
    LOW = 1

class Point(NamedTuple):
    x: int = 3

class Shape(ABC):
    size = 1
    @abstractmethod
    def area(self): ...

class Has(Protocol):
    size: int = 2

@total_ordering
class Sized:
    __slots__ = ("size",)
    def __init__(self): self.size = 1
    def __eq__(self, other): return True
    def __lt__(self, other): return False

def train():
    print(Wrapped().run(), One.name, Color.RED, Level.LOW + 0, Point(), Shape.size, Has.size)
    print(Sized() <= Sized())
""")
    assert on_ranks(names) == "5 One Color.RED 1 Point(x=3) 1 2\nTrue\n"


def test_of_two_classes_of_a_name_the_one_that_is_meant_is_sent(cell: Cells) -> None:
    names = cell("class Settings:\n    rate = 1\ndef train():\n    print(Settings.rate)\n")
    first = names["Settings"]
    cell("class Settings:\n    rate = 2\n")["Settings"] = first  # its cell was run once more
    assert on_ranks(names) == "1\n"


def test_a_text_that_begins_left_of_its_block_stays_as_it_is(cell: Cells) -> None:
    names = cell(
        "if True:\n    def train():\n        text = '''\nfirst\n   second\n'''\n"
        "        print(repr(text))\n"
    )
    assert on_ranks(names) == "'\\nfirst\\n   second\\n'\n"
    names = cell(
        "if True:\n    def train():\n        text = '''\n        first'''\n"
        "        print(repr(text))\n"
    )
    assert on_ranks(names) == "'\\n        first'\n"


@pytest.mark.parametrize("flags", [0, annotations.compiler_flag])
def test_source_is_found_below_a_magic_that_gives_it_a_name_without_lines(
    cell: Cells, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    cell("def other(): pass\n")
    body = "class Settings: pass\nasync def helper(): pass\ndef train():\n    print('timed')\n"
    line = f"get_ipython().run_cell_magic('time', '', {body!r})\n"
    monkeypatch.setitem(linecache.cache, "<cell>", (len(line), None, [line], "<cell>"))
    main = vars(sys.modules["__main__"])
    code = compile(ast.parse(body), "<timed exec>", "exec", flags, dont_inherit=True)
    exec(code, main)  # noqa: S102 - as IPython does
    assert on_ranks(main) == "timed\n"
    names = cell("def train():\n    print(Settings.__name__, helper.__name__)\n")
    assert on_ranks(names) == "Settings helper\n"


def test_a_cached_function_of_a_notebook_goes_along(cell: Cells) -> None:
    names = cell(
        "from functools import lru_cache\n@lru_cache\ndef square(x):\n    return x * x\n"
        "def train():\n    print(square(3))\n"
    )
    assert on_ranks(names) == "9\n"


def test_a_class_that_a_call_has_made_is_refused_with_what_to_write(cell: Cells) -> None:
    names = cell(
        "from dataclasses import make_dataclass\nMade = make_dataclass('Made', ['x'])\n"
        "def train():\n    print(Made(1))\n"
    )
    error = refusal(names)
    assert "the source of `Made` is not known" in str(error)
    assert "write it as a `def` or `class` statement" in error.hint
