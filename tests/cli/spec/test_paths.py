"""Paths to fields are shown, read and mended."""

from __future__ import annotations

import ast
import re

import pytest

from kdist.spec import reference
from kdist.spec.reference import elsewhere, near_name, near_path, parse, show
from tests.house.tree import ROOT


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("spec", "nodes", "max"), "spec.nodes.max"),
        (("spec", "env", 0, "name"), "spec.env[0].name"),
        (("spec", "nodeSelector", "example.com/disk"), 'spec.nodeSelector["example.com/disk"]'),
        (("spec", "podTemplate", "a b"), 'spec.podTemplate["a b"]'),
    ],
)
def test_a_path_that_is_shown_can_be_read(path: tuple[str | int, ...], text: str) -> None:
    assert show(path) == text
    assert parse(text) == path


@pytest.mark.parametrize(
    "text", ["", ".", "a..b", ".a", "a[", "a[x]", "a[-1]", "a b", 'a["', "a[99999999]"]
)
def test_what_is_no_path_is_none(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("max_restarts", "maxRestarts"),
        ("MAXRESTARTS", "maxRestarts"),
        ("maxRestart", "maxRestarts"),
        ("x", ""),
    ],
)
def test_a_near_name_is_found_whatever_its_case_and_separators(word: str, name: str) -> None:
    assert near_name(word, ["maxRestarts", "nodes", "image"]) == name


def test_a_name_that_stands_elsewhere_is_found_only_if_it_is_the_only_one() -> None:
    assert elsewhere("epochs") == "spec.train.epochs"
    assert elsewhere("name") == ""
    assert elsewhere("nothing-like-it") == ""


@pytest.mark.parametrize("folder", ["trainer/kdist_trainer/causes", "cli/kdist/diagnose"])
def test_every_field_that_an_advice_names_exists(folder: str) -> None:
    named = {
        path
        for file in (ROOT / folder).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for path in re.findall(r"\bspec\.(?:\w+\.?)+", node.value)
    }
    assert len(named) > 5
    assert [path for path in named if reference.look_up(path) is None] == []


@pytest.mark.parametrize("field", list(reference.root().walk()), ids=lambda field: field.path)
def test_every_field_is_found_by_its_path_and_by_a_slip_in_it(field: reference.Field) -> None:
    found = reference.look_up(field.path)
    assert found is not None
    assert found.path == field.path
    if field.path.startswith("spec.") and len(field.name) > 5:
        slip = parse(
            field.path.replace("[]", "[0]").replace(field.name, field.name[:-2] + field.name[-1])
        )
        assert slip is not None
        assert near_path(slip).replace("[0]", "[]") == field.path
