"""A public class name stands once per distribution, and a label or variable in one module; the
command line looks for events that the trainer writes.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kdist import _MODULES
from tests.house.tree import ROOT, python_files


@pytest.mark.parametrize(
    "root", ["cli/kdist", "controller/kdist_controller", "trainer/kdist_trainer", "tools"]
)
def test_a_public_class_name_stands_once_per_distribution(root: str) -> None:
    names = Counter(
        node.name
        for path in python_files()
        if path.is_relative_to(ROOT / root)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_what_two_sides_must_spell_alike_stands_in_one_module() -> None:
    """A label or annotation of kdist's in the whole product; a variable in each distribution, which
    may have it from `kdist_trainer.formats`.
    """
    where: defaultdict[str, set[Path]] = defaultdict(set)
    for path in python_files("cli", "controller", "trainer"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.value if isinstance(node, ast.Constant) else None
            if isinstance(name, str) and re.fullmatch(r"kdist\.dev/[-a-z]+|KDIST_[A-Z_]+", name):
                where[name].add(path if "/" in name else path.relative_to(ROOT).parents[-2])
    assert {name: found for name, found in where.items() if len(found) > 1} == {}


def test_names_that_programs_import_are_declared_as_they_are_found() -> None:
    tree = ast.parse((ROOT / "cli/kdist/__init__.py").read_text())
    declared = {
        (str(node.module), alias.asname)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = {
        (f"kdist.{module}", name) for module, all_ in _MODULES.items() for name in all_.split()
    }
    assert found <= declared
    assert {module for module, _ in declared - found} == {"__future__", "importlib", "typing"}


def texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The texts among these values."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Tuple):
            yield from texts(node.elts)


def events_read(path: Path) -> Iterator[str]:
    """Names of events that a module looks for in a ledger."""
    tree = ast.parse(path.read_text())
    known = {
        each.target.id: each.value
        for each in tree.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"_named", "_said_last"}:
            name = node.args[1]
            yield from texts([known.get(name.id, name) if isinstance(name, ast.Name) else name])
        elif isinstance(node, ast.Compare):
            field = ast.unparse(node.left)
            if field.endswith((".get('event')", "['event']")):
                yield from texts(node.comparators)


def events_written(path: Path) -> Iterator[str]:
    """Names of events that a module writes into a ledger."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), node.args
            if called == "partial" and given:
                called, given = ast.unparse(given[0]), given[1:]
            if called.endswith((".append", ".append_event", ".add_event")):
                yield from texts(given[:1])
        elif isinstance(node, ast.Dict):
            names = zip(node.keys, node.values, strict=True)
            yield from texts(
                value for key, value in names if [*texts([key] if key else [])] == ["event"]
            )


def test_events_that_the_command_line_looks_for_in_a_ledger_are_written_by_the_trainer() -> None:
    readers = [ROOT / "cli/kdist/ledger.py", *(ROOT / "cli/kdist/report").glob("*.py")]
    read = {name for path in readers for name in events_read(path)}
    assert read >= {"generation", "commit", "tracker-behind", "separate-ranks"}
    written = {name for path in python_files("trainer") for name in events_written(path)}
    assert read - written == set()
