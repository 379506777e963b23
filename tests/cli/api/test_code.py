"""What of a notebook goes along with a function: all that it uses, or an error that names what
cannot. The files that were made run without kdist.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kdist
from kdist.errors import UsageError
from tests.cli.api.conftest import Cells, folder, on_ranks, output, refusal
from tests.docs.blocks import DOCS

CELL = """
import json as notation
import os.path
from dataclasses import dataclass
from functools import partial, wraps
from math import pi

RATES = {"low": 0.1, "high": [1, 2]}
half = partial(divmod, 1)


@dataclass
class Settings:
    rate: float = RATES["low"]


class Base:
    def name(self):
        return type(self).__name__


class Derived(Base):
    label = f"{pi:.2f}"


def loud(function):
    @wraps(function)
    def inner(*given, **options):
        print("called")
        return function(*given, **options)

    return inner


def even(number):
    return number == 0 or odd(number - 1)


def odd(number):
    return number != 0 and even(number - 1)


@loud
def train(steps, name="x"):
    def count():
        return [even(each) for each in range(steps)]

    print(notation.dumps(count()), name, os.path.basename("a/b"))
    print(Settings(), Derived().name(), Derived.label, RATES["high"], len("abc"))
"""


def test_a_function_takes_along_what_it_uses_and_nothing_else(cell: Cells) -> None:
    names = cell(CELL)
    job = kdist.from_code(names["train"], args={"steps": 3}, nodes=2, image="r/i:1")
    assert output(job) == (
        "called\n[true, false, true] x b\nSettings(rate=0.1) Derived 3.14 [1, 2] 3\n"
    )
    assert "half" not in (folder(job) / "run_train.py").read_text()
    assert (job.name, job.job.spec.nodes.max, job.job.spec.image) == ("train", 2, "r/i:1")


def test_what_was_defined_last_is_what_is_meant(cell: Cells) -> None:
    cell("def helper():\n    return 1\n\ndef train():\n    print(helper())\n")
    names = cell("def helper():\n    return 2\n")
    assert on_ranks(names) == "2\n"


def test_modules_next_to_the_notebook_are_copied(
    cell: Cells, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "near.py").write_text("from nearer.deep import VALUE\n")
    (home / "nearer").mkdir()
    (home / "nearer" / "__init__.py").write_text("")
    (home / "nearer" / "deep.py").write_text("VALUE = 5\n")
    (home / "unused.py").write_text("")
    monkeypatch.syspath_prepend(str(home))
    names = cell(
        "import unused, near\nfrom near import VALUE as v\n"
        "def train():\n    print(near.VALUE + v)\n"
    )
    job = kdist.from_code(names["train"])
    made = {path.relative_to(folder(job)).as_posix() for path in folder(job).rglob("*.py")}
    assert made == {"run_train.py", "near.py", "nearer/__init__.py", "nearer/deep.py"}
    assert output(job) == "10\n"
    for each in ("near", "nearer", "nearer.deep", "unused"):
        sys.modules.pop(each)


def test_a_closure_takes_its_constants_along(cell: Cells) -> None:
    names = cell(
        "def make(number):\n    def train():\n        print(number + 1)\n    return train\n"
    )
    assert output(kdist.from_code(names["make"](4))) == "5\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("train = lambda: 1", "is neither a function nor the class of a workload"),
        ("train = 5", "5 is neither a function"),
        ("held = open('/dev/null')\ndef train():\n    held.read()", "`held`, which `train` uses"),
        (
            "def make(held):\n    def train():\n        return held\n    return train\n"
            "train = make(object())",
            "`held`, which `train` uses",
        ),
        (
            "held = object()\ndef inner():\n    return held\ndef train():\n    inner()",
            "`held`, which `inner` uses",
        ),
        ("key = lambda: 1\ndef train():\n    key()", "`key`, which `train` uses"),
        ("def train(rate):\n    pass", "missing a required argument: 'rate'"),
    ],
)
def test_what_cannot_go_along_is_refused_by_name(cell: Cells, source: str, message: str) -> None:
    names = cell(source)
    with pytest.raises(UsageError) as caught:
        kdist.from_code(names["train"])
    assert message in str(caught.value)


def test_the_page_about_python_shows_the_error_that_is_raised(cell: Cells) -> None:
    names = cell("import torch\nbatch = torch.zeros(2)\ndef train():\n    return batch")
    with pytest.raises(UsageError) as caught:
        kdist.from_code(names["train"])
    shown = f"kdist.errors.UsageError: {caught.value}\nHint: {caught.value.hint}\n"
    assert shown in (DOCS / "how-to" / "python.md").read_text()


def test_an_argument_that_cannot_be_written_is_refused_with_its_place(cell: Cells) -> None:
    names = cell("def train(model):\n    pass")
    with pytest.raises(UsageError, match="`model`, which the call uses"):
        kdist.from_code(names["train"], args={"model": object()})
    with pytest.raises(UsageError, match=r"`model\['a'\]\[1\]`, which the call uses"):
        kdist.from_code(names["train"], args={"model": {"a": [1, object()]}})


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("async def train(): pass", "an async function"),
        ("def train(): yield 1", "a generator function"),
        ("async def train(): yield 1", "an async generator function"),
    ],
)
def test_a_function_whose_call_runs_nothing_is_refused(cell: Cells, source: str, kind: str) -> None:
    with pytest.raises(UsageError, match=f"`train` is {kind}, and calling it") as caught:
        kdist.from_code(cell(source)["train"])
    assert "in a plain function" in caught.value.hint


@pytest.mark.parametrize(
    ("call", "problem", "hint"),
    [
        ("Plain, train={'steps': 1}", "`Plain` is a class, and not that of a", "derive it from"),
        ("Half, train={'steps': 1}", "`Half` lacks dataset, loss", "define them"),
        ("Whole, train={'steps': 1}, args={'a': 1}", "args are for a function", 'train={"options'),
        ("Plain(), train={'steps': 1}", "neither a function nor the class", "the class itself"),
        ("train, train={'steps': 1}", "`train` is a function, and `train` is", "leave `train` out"),
        ("train, args=[1]", r"args: \[1\] has no names", 'args={"name": value}'),
    ],
)
def test_a_target_that_does_not_fit_the_call_is_refused_at_once(
    cell: Cells, call: str, problem: str, hint: str
) -> None:
    source = """
import kdist
from kdist_trainer.workload import Workload
class Plain: pass
class Half(Workload):
    def model(self): pass
class Whole(Half):
    def dataset(self, split): pass
    def loss(self, model, batch): pass
def train(): pass
"""
    with pytest.raises(UsageError, match=problem) as caught:
        cell(f"{source}kdist.from_code({call})\n")
    assert hint in caught.value.hint


def test_a_function_whose_source_is_lost_is_refused() -> None:
    space: dict[str, object] = {"__name__": "__main__"}
    exec("def train():\n    pass", space)  # noqa: S102 - as a program that is piped to Python
    function = space["train"]
    assert callable(function)
    with pytest.raises(UsageError, match="the source of `train` is not known") as caught:
        kdist.from_code(function)
    assert "in a cell of a notebook" in caught.value.hint


@pytest.mark.parametrize("file", ["run_train.py", "run_train/__init__.py"])
def test_a_module_of_the_name_that_the_function_gets_is_refused(
    cell: Cells, home: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (home / file).parent.mkdir(exist_ok=True)
    (home / file).write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(home))
    names = cell("import run_train\ndef train():\n    print(run_train.VALUE)\n")
    del sys.modules["run_train"]
    error = refusal(names)
    assert "your module `run_train` has the name of the one" in str(error)
    assert error.hint == "rename `train` or the module"


def test_the_code_of_a_program_is_the_same_in_each_process(home: Path) -> None:
    program = "import kdist\nWORDS = {'a', 'b', 'c', 'd'}\ndef train():\n    print(WORDS)\n"
    (home / "program.py").write_text(f"{program}print(kdist.from_code(train).job.spec.code.path)\n")
    made = {
        subprocess.check_output(
            [sys.executable, "program.py"], cwd=home, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in "123"
    }
    assert len(made) == 1


def test_a_wrong_field_of_the_job_is_named(cell: Cells) -> None:
    names = cell("def train():\n    pass")
    with pytest.raises(kdist.KdistError) as caught:
        kdist.from_code(names["train"], nodes=0, max_restart=2)
    assert "spec.nodes" in str(caught.value)
    assert "maxRestarts" in str(caught.value)


def test_code_goes_to_a_cluster_though_git_ignores_the_run_folders(cell: Cells, home: Path) -> None:
    (home / ".git").mkdir()
    (home / ".gitignore").write_text(".kdist/\n*.py\n")
    job = kdist.from_code(cell("def train():\n    pass")["train"], image="r/i:1")
    sent = [each for each in job.render() if "def train()" in str(each.get("data"))]
    assert len(sent) == 1


def test_a_file_of_the_code_that_was_cut_off_is_written_again(cell: Cells) -> None:
    names = cell("def train():\n    print('all')\n")
    job = kdist.from_code(names["train"])
    file = folder(job) / "run_train.py"
    file.write_bytes(file.read_bytes()[:40])  # as a version that did not replace files left it
    assert on_ranks(names) == "all\n"


def test_code_is_written_whole_or_not_at_all(home: Path) -> None:
    program = """
import kdist, resource
def train():
    return "TEXT"
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))  # as a full disk ends a write
try:
    kdist.from_code(train)
except kdist.KdistError as error:
    print(error, error.hint)
"""
    (home / "program.py").write_text(program.replace("TEXT", "x" * 20_000))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=home, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"cannot write .*run_train.py: .* set KDIST_HOME to .*\n", done.stdout)
    assert [path for path in (home / ".kdist").rglob("*") if path.is_file()] == []
