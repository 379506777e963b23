"""The module that the ranks import: its order, whose names it has, and all that it refuses."""

from __future__ import annotations

import builtins
from functools import wraps
from typing import Any

import pytest

from tests.cli.api.conftest import Cells, on_ranks, refusal


def of_ipython(name: str) -> object:
    """A function of IPython's that it puts into a notebook's names: its `open` wraps Python's."""
    space: dict[str, Any] = {"__name__": "IPython.core.interactiveshell"}
    exec(f"def {name}(*_):\n    raise ValueError", space)  # noqa: S102 - in a module of that name
    function = space[name]
    return wraps(open)(function) if name == "_modified_open" else function


def test_what_ipython_has_put_over_a_builtin_is_the_builtin_on_the_ranks(cell: Cells) -> None:
    names = cell("def train():\n    print(open('/dev/null').read() == '')\n    exit()\n")
    names |= {"open": of_ipython("_modified_open"), "exit": of_ipython("exiter")}
    assert on_ranks(names) == "True\n"


def test_what_only_a_notebook_has_is_refused_with_the_reason(
    cell: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    display = of_ipython("display")
    monkeypatch.setattr(builtins, "display", display, raising=False)
    names = cell("def train():\n    display(1)\n    get_ipython().system('ls')\n")
    names["get_ipython"] = of_ipython("get_ipython")
    error = refusal(names)
    for name in ("display", "get_ipython"):
        assert f"`{name}`, which `train` uses, is IPython's" in str(error)
    assert error.hint == "print or save instead; lines with `!` or `%` use it too"


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("class A:\n    def make(self): return B()\nclass B(A): pass\nobj = A().make()", "B"),
        (
            "class A:\n    def make(self): return C()\nclass B(A): pass\nclass C(B): pass\n"
            "obj = B().make()",
            "C",
        ),
        (
            "def tag(of): of.tag = text(); return of\ndef text(): return tag.__name__\n"
            "@tag\nclass A: pass\nobj = A()",
            "A",
        ),
        (
            "from __future__ import annotations\n"
            "class A:\n    def make(self) -> B: return B()\nclass B(A): pass\nobj = A().make()",
            "B",
        ),
        (
            "def first(): return len(steps)\ndef last(): return 2\nsteps = [first, last]\n"
            "class A:\n    size = steps[1]()\nobj = A()",
            "A",
        ),
    ],
)
def test_what_a_definition_needs_comes_before_it(cell: Cells, source: str, printed: str) -> None:
    names = cell(f"{source}\nobj = type(obj)\ndef train():\n    print(obj.__name__)\n")
    assert on_ranks(names) == f"{printed}\n"


def test_a_function_in_a_function_is_not_that_of_its_name_outside(cell: Cells) -> None:
    source = """
def outer():
    def helper():
        return 1
    def train():
        print(helper()MORE)
    return train
def helper():
    return 2
def other():
    return helper()
train = outer()
"""
    names = cell(source.replace("MORE", ""))
    assert on_ranks(names) == "1\n"
    error = refusal(cell(source.replace("MORE", " + other()")))
    assert "`helper`, which `other` uses, is not the `helper` that `train` uses" in str(error)


def test_everything_that_is_refused_is_named_at_once(cell: Cells) -> None:
    names = cell(
        "first = object()\nrates = {'a': [object()]}\nitself = []\nitself.append(itself)\n"
        "def inner():\n    return rates, first\n"
        "def train():\n    return first, inner(), itself\n"
    )
    error = refusal(names)
    assert [line.partition(" is in")[0] for line in str(error).splitlines()] == [
        "`first`, which `train` uses,",
        "`rates['a'][0]`, which `inner` uses,",
        "`itself`, which `train` uses,",
    ]
    assert error.hint == "make it inside the function, or in a function that it calls"


def test_a_decorator_is_applied_once_to_what_it_got(cell: Cells) -> None:
    names = cell(
        "def twice(of):\n    def run():\n        of()\n        of()\n    return run\n"
        "@twice\ndef train():\n    print('once')\n"
    )
    assert on_ranks(names) == "once\nonce\n"


def test_a_function_that_a_call_has_wrapped_is_refused(cell: Cells) -> None:
    names = cell(
        "from functools import wraps\ndef loud(of):\n    @wraps(of)\n    def inner():\n"
        "        print('loud')\n        of()\n    return inner\n"
        "def job():\n    pass\ntrain = loud(job)\n"
    )
    assert "`job` was wrapped by a call, which its source does not" in str(refusal(names))
    names = cell("@wraps(job)\ndef train():\n    pass\n")  # is not the function of its name
    assert "`job` was wrapped by a call" in str(refusal(names))


def test_a_dictionary_that_decorators_have_filled_is_refused(cell: Cells) -> None:
    names = cell(
        "known = {}\ndef register(of):\n    known[of.__name__] = of\n    return of\n"
        "@register\ndef plug():\n    return 1\n"
        "def train():\n    print(known['plug']())\n"
    )
    assert "`known`, which `train` uses, is in the memory" in str(refusal(names))


def test_values_that_raise_errors_of_their_own_are_refused_by_name(cell: Cells) -> None:
    names = cell(
        "class Settings(dict):\n    __getattr__ = dict.__getitem__\n"
        "class Odd:\n    __call__ = None\n    def __getattr__(self, name): raise OSError(name)\n"
        "    def __repr__(self): raise OSError\n    def __eq__(self, other): raise OSError\n"
        "settings, odd = Settings(rate=1), Odd()\n"
        "class Model:\n    settings = settings\n    odd = odd\n"
        "def train():\n    print(Model, settings.rate, odd)\n"
    )
    assert [line.partition(" is in")[0] for line in str(refusal(names)).splitlines()] == [
        "`odd`, which `train` uses,",
        "`settings`, which `train` uses,",
    ]
