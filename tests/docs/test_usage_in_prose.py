"""Commands, options and fields that pages, help, errors and hints name are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import click

from kdist.app import COMMANDS, load_command
from kdist.spec import reference
from tests.docs.blocks import PAGES
from tests.house.tree import ROOT, python_files

TYPED: Final = re.compile(r"\bkdist ([a-z][a-z-]+)([^`|;&\"#\n]*)")
OPTION: Final = re.compile(r"(?<![^\s\[])(--[a-z][a-z-]*|-[a-zA-Z])(?![\w-])")
OF_A_SCRIPT: Final = re.compile(r"\.py\b| -m | -- ")
"""After it, options are those of a script."""

SECTIONS: Final = "spec|train|checkpoints?|loader|restart|logs|preflight|resources|install|script"
FIELD: Final = re.compile(
    rf"(?<![\w./$]|\[)(?:{SECTIONS})(?:\.[a-z][A-Za-z]*)+(?:\[\]|\[\d\])?(?![\w(/*])"
)
FILES: Final = re.compile(r"\.(?:py|md|json|yaml|safetensors)$")
FREE: Final = ("podTemplate", "options", "nodeSelector", "annotations", "labels")
"""Fields of which the file's author chooses the names."""
ELSEWHERE: Final = {
    "spec.nodeName": "of a pod",
    "spec.standby": "of an older kdist, which is told so",
    "resources.requests": "of a container",
    "resources.limits": "of a container",
    "script.api": "a module",
    "script.stop": "a module",
}


def texts() -> Iterator[tuple[Path, str, bool]]:
    """Pages, and the strings of the products and tools: with whether it is a docstring."""
    for path in (*PAGES, ROOT / "README.md", *(ROOT / "charts/kdist").rglob("*.md")):
        yield path, path.read_text(), False
    for path in python_files("cli", "trainer", "controller", "tools"):
        tree = ast.parse(path.read_text())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        described = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        docs = {ast.get_docstring(node, clean=False) for node in described}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.value, node.value in docs


TEXTS: Final = list(texts())


@cache
def options() -> dict[str, set[str]]:
    """The options of each command, with those of its subcommands."""

    def collect(command: click.Command) -> set[str]:
        own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        below: dict[str, click.Command] = getattr(command, "commands", {})
        return own.union(["--help", "-h"], *map(collect, below.values()))

    names = [name for section in COMMANDS.values() for name in section]
    return {name: collect(load_command(name)) for name in names}


def find_wrong(path: Path, text: str) -> Iterator[str]:
    place = str(path.relative_to(ROOT))
    for command, rest in TYPED.findall(text):
        if command in options():
            own = OF_A_SCRIPT.split(rest)[0]
            for option in set(OPTION.findall(own)) - options()[command]:
                yield f"{place}: kdist {command} has no {option}"
    for command in re.findall(r"`kdist ([a-z][a-z-]+)", text):
        if command not in options():
            yield f"{place}: no command {command}"


def test_every_command_and_option_that_a_text_names_exists() -> None:
    wrong = [found for path, text, _ in TEXTS for found in find_wrong(path, text)]
    assert wrong == []
    named = {command for _, text, _ in TEXTS for command, _ in TYPED.findall(text)}
    assert options().keys() <= named


def test_every_command_that_is_built_has_its_options() -> None:
    wrong, count = [], 0
    for path in python_files("cli", "controller"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".kdist")):
                continue
            given = [each.value for each in node.args if isinstance(each, ast.Constant)]
            if not given:  # which another function has passed on
                continue
            count += 1
            command, *rest = map(str, given)
            unknown = {each for each in rest if each.startswith("-")} - options()[command]
            wrong += [f"{path}: kdist {command} {each}" for each in unknown]
    assert wrong == []
    assert count > 50


def test_every_field_that_a_text_names_exists() -> None:
    paths = [field.path.replace("[]", "") for field in reference.root().walk()]
    parts = [path.split(".") for path in paths]
    known = {".".join(each[start:]) for each in parts for start in range(len(each))}
    wrong, count = [], 0
    for path, text, is_docstring in TEXTS:
        if is_docstring or path.is_relative_to(ROOT / "cli/kdist/convert"):
            continue  # modules, and fields of other programs
        for match in FIELD.finditer(text):
            name = re.sub(r"\[\d?\]", "", match[0])
            named = re.split(rf"(?<=\.)(?:{'|'.join(FREE)})\b", name)[0].rstrip(".")
            count += 1
            if not (named in known or named in ELSEWHERE or FILES.search(named)):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []
    assert count > 400
