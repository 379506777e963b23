"""Modules of one's own are copied from wherever they are imported, as they are on the disk."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import kdist
from tests.cli.api.conftest import Cells, folder, output, refusal

OWN = """
import far.deep.end
STEPS = 1
COUNT = 0
CACHE = {}

def steps():
    global COUNT
    COUNT += 1
    CACHE["a"] = 1
    return STEPS + far.deep.end.MORE

class Model:
    size = 1

    def run(self):
        return 1
"""
CELL = "import own\nown.steps()\ndef train():\n    print(own.steps())\n"


@pytest.fixture(autouse=True)
def source(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder next to that of the notebook, whose modules it imports."""
    folder = home.parent / f"{home.name}-source"
    (folder / "far" / "deep").mkdir(parents=True)
    (folder / "far" / "deep" / "end.py").write_text("MORE = 4\n")
    (folder / "own.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path, f"../{folder.name}"])
    known = {*sys.modules}
    yield folder
    for each in {*sys.modules} - known:
        del sys.modules[each]


def test_modules_of_a_folder_that_was_added_to_the_path_are_copied(cell: Cells) -> None:
    names = cell(CELL)
    job = kdist.from_code(names["train"])
    made = {path.relative_to(folder(job)).as_posix() for path in folder(job).rglob("*.py")}
    assert made == {"run_train.py", "own.py", "far/deep/end.py"}
    assert output(job) == "5\n"


@pytest.mark.parametrize("part", ["part.abi3.so", "words.json"])
def test_installed_modules_and_those_with_compiled_parts_or_data_are_not_copied(
    cell: Cells, source: Path, part: str
) -> None:
    (source / "fast").mkdir()
    (source / "fast" / "__init__.py").write_text("")
    (source / "fast" / part).write_text("")
    names = cell("import fast, json, yaml, kdist\ndef train():\n    fast, json, yaml, kdist\n")
    job = kdist.from_code(names["train"])
    assert [path.name for path in folder(job).rglob("*.py")] == ["run_train.py"]


@pytest.mark.parametrize(
    ("later", "name"),
    [
        ("own.STEPS = 7", "STEPS"),
        ("own.steps = lambda: 2", "steps"),
        ("own.Model.size = 2", "Model.size"),
        ("own.Model.run = lambda self: 2", "Model.run"),
    ],
)
def test_a_module_that_was_changed_in_memory_is_warned_of(
    cell: Cells, later: str, name: str
) -> None:
    names = cell(CELL)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kdist.from_code(names["train"])
        assert said == []
        cell(later)
        kdist.from_code(names["train"])
    assert [str(each.message).partition(" is not what own.py")[0] for each in said] == [
        f"`own.{name}`"
    ]


def test_a_module_that_was_changed_on_the_disk_is_warned_of(cell: Cells, source: Path) -> None:
    names = cell(CELL)
    (source / "own.py").write_text(OWN.replace("return STEPS", "return 2 * STEPS"))
    with pytest.warns(kdist.KdistWarning, match="`own.steps` is not what own.py says"):
        job = kdist.from_code(names["train"])
    assert output(job) == "6\n"


def test_a_module_that_cannot_be_read_is_refused_by_its_file(cell: Cells, source: Path) -> None:
    names = cell("import own\ndef train():\n    print(own.steps())\n")
    (source / "own.py").write_text(f"{OWN}\ndef later():\n    import broken\n")
    (source / "broken.py").symlink_to("/proc/self/mem")  # whose first page nobody can read
    assert re.fullmatch(r"cannot read .*/broken.py: Input/output error", str(refusal(names)))


def test_a_package_of_the_notebooks_folder_is_copied_without_its_data(
    cell: Cells, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "near" / "data.py").mkdir(parents=True)
    (home / "near" / "__init__.py").write_text("VALUE = 5\n")
    (home / "near" / "words.json").write_text("")
    monkeypatch.syspath_prepend(str(home))
    job = kdist.from_code(cell("import near\ndef train():\n    print(near.VALUE)\n")["train"])
    made = {path.relative_to(folder(job)).as_posix() for path in folder(job).rglob("*.*")}
    assert made == {"run_train.py", "near/__init__.py", ".kdistignore"}
