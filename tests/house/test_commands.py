"""Every command is in the table of `kdist --help`, has a module of its name, and explains
itself.
"""

from __future__ import annotations

from pathlib import Path

import click
import pytest

import kdist.commands
from kdist import slices
from kdist.app import COMMANDS, load_command

LINES = {name: line for section in COMMANDS.values() for name, line in section.items()}
# `confirmation`, `options` and `targets` hold what commands have in common.
MODULES = {path.stem for path in Path(kdist.commands.__file__).parent.glob("*.py")} - {
    "__init__",
    "confirmation",
    "options",
    "targets",
}


def test_the_table_and_the_folder_hold_the_same_commands() -> None:
    core = {name.replace("-", "_") for name in LINES if name not in slices.COMMANDS}
    assert core == MODULES


@pytest.mark.parametrize("name", LINES)
def test_a_command_has_a_help_that_begins_with_its_line_in_the_table(name: str) -> None:
    command = load_command(name)
    assert command.help is not None
    assert command.help.replace("\b", "").split("\n")[0].strip() == LINES[name]


@pytest.mark.parametrize("name", LINES)
def test_a_command_shows_an_example_and_explains_every_option(name: str) -> None:
    command = load_command(name)
    assert f"kdist {name}" in (command.help or "") + (command.epilog or "")
    assert [
        option.name
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ] == []
