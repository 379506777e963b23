"""A clean machine: a fresh clone of what is committed, and an environment that holds only the
built wheels.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.house.wheels import build


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the committed state in a folder of its own."""
    folder = tmp_path_factory.mktemp("clean") / "kdist"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def installed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of programs of an environment with the two wheels built from the clone; the clone is
    moved away afterwards.

    The locked dependencies are seen through a path file instead of being copied: they are
    gigabytes, and not ours.
    """
    folder = tmp_path_factory.mktemp("installed")
    wheels = build(clone, folder / "dist")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
    )
    python = folder / "venv" / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    install = [
        str(uv),
        "pip",
        "install",
        "--quiet",
        "--offline",
        "--no-deps",
        "--python",
        str(python),
        *map(str, wheels),
    ]
    subprocess.run(install, check=True)
    site = Path(
        sysconfig.get_path(
            "purelib", vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")}
        )
    )
    # Behind the environment's own packages, and without the path files that lead to this checkout.
    (site / "locked.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clone.rename(clone.with_name("moved-away"))
    return python.parent


@pytest.fixture
def clean_env(installed: Path, tmp_path: Path) -> dict[str, str]:
    """Environment variables of someone who has the wheels and an empty home."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KDIST_", "PYTHON", "VIRTUAL_ENV"))
    }
    return kept | {"PATH": f"{installed}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def find_failure(
    commands: Sequence[str],
    home: Path,
    environment: Mapping[str, str],
    *,
    shown: Iterable[Sequence[str]] = (),
) -> str:
    """Type commands one after the other in an empty folder with the examples.

    They are typed into one shell, so that `cd` and `export` last.

    Args:
        commands: what is typed.
        home: an empty folder.
        environment: the variables of the shell.
        shown: for each command, first words of lines that it prints in any order.

    Returns:
        The output until a command failed, or what one has not printed; "" if all is well.
    """
    folder = home / "empty"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    # the last line that is printed like this names the command that failed
    script = "\n".join(
        line
        for command in commands
        for line in (f"printf '\\n%s\\n' {shlex.quote('$ ' + command)}", command)
    )
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        return done.stdout[-6000:]
    rest, printed = done.stdout, list[str]()
    for command in reversed(commands):
        rest, found, output = rest.rpartition(f"\n$ {command}\n")
        assert found, f"{command} is not in {done.stdout}"
        printed.insert(0, output)
    return "\n".join(
        f"$ {command}\nprints no line that begins with {word}, but:\n{output}"
        for command, words, output in zip(commands, shown, printed, strict=False)
        for word in words
        if not _begins_line(word, output)
    )


def _begins_line(word: str, output: str) -> bool:
    """Whether a line begins with a word, in which any number may be another one."""
    pattern = re.sub(r"\d+", r"\\d+", re.escape(word))
    return "…" in word or re.search(rf"^\s*{pattern}(?!\S)", output, re.MULTILINE) is not None
