"""What a run keeps on this machine is written through one door, which makes it the user's alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.tree import ROOT, broken, python_files

DOOR = ROOT / "cli" / "kdist" / "local" / "run_dir.py"
LOCAL = tuple(path for path in python_files("cli") if path.parent == DOOR.parent and path != DOOR)


def open_writes(source: str) -> Iterator[str]:
    """Calls that write a file, or make a folder, with the mode that the umask gives."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        given = [*node.args, *(each.value for each in node.keywords)]
        modes = [each.value for each in given if isinstance(each, ast.Constant)]
        writes = name == "open" and any(
            isinstance(mode, str) and set(mode) <= set("rwxab+t") and set(mode) & set("wxa+")
            for mode in modes
        )
        if name in {"write_text", "write_bytes"} or writes:
            yield f"{node.lineno}: {ast.unparse(node)}: use run_dir.open_private or write_json"


def test_every_file_of_a_run_is_opened_by_the_run_folder() -> None:
    assert broken(open_writes, LOCAL) == []


@pytest.mark.parametrize(
    "line",
    ["log.open('ab')", "path.write_text('x')", "open('log', mode='w')", "p.write_bytes(b'')"],
)
def test_a_second_door_is_noticed(line: str) -> None:
    assert list(open_writes(line)) != []


@pytest.mark.parametrize("line", ["path.open('rb')", "open_private(log, 'ab')", "p.read_text()"])
def test_reading_and_the_door_itself_are_left_alone(line: str) -> None:
    assert list(open_writes(line)) == []
