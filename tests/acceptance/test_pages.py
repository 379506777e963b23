"""The sessions of the documentation's pages, typed into a real shell by someone who has the wheels:
each page from its first command to its last, in an empty folder with the examples.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, blocks
from tests.house.tree import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]


def typed(page: Path) -> list[str]:
    """What a page has one type, without a cluster."""
    return [
        command
        for block in blocks(page.read_text())
        if block.language in {"console", "bash"} and block.is_run and not block.on_a_cluster
        for command in block.commands
    ]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if typed(page)],
    ids=lambda page: f"{page.parent.name}/{page.stem}",
)
def test_every_command_of_a_page_succeeds_in_its_turn(
    page: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    # One shell, so that `cd` and `export` last; its last echo names the command that failed.
    script = "\n".join(
        line
        for command in typed(page)
        for line in (f"printf '%s\\n' {shlex.quote('$ ' + command)}", command)
    )
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env=clean_env,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
