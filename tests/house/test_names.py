"""A public class name stands once per distribution, and a label or variable in one module."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

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
