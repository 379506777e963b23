"""Options of kdist can be deleted: without their folders, all else works, and nothing names them.

`make slices` runs all of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from kdist import slices
from tests.house.tree import ROOT, python_files

SLICES = sorted({*slices.COMMANDS.values(), "api", "crd", "tensorboard"})
COMMANDS = {name: command for command, name in slices.COMMANDS.items()}
OF_THE_TRAINER = ("bench", "fetch", "integrations", "profiling", "tensorboard", "tracker")

JOB = """\
apiVersion: kdist.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
  nodes: 1
  procsPerNode: 1
  image: registry.example/kdist-trainer:1
  train: {workload: digits, steps: 3}
"""

# Imports every module that is left, and types commands, in one process.
PROGRAM = """\
import importlib, json, pkgutil, sys
import kdist
from click.testing import CliRunner
from kdist.app import cli

for module in pkgutil.walk_packages(kdist.__path__, "kdist."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
results = [CliRunner().invoke(cli, words, prog_name="kdist") for words in json.loads(sys.argv[1])]
print(json.dumps([[each.exit_code, each.output] for each in results]))
"""


def copy(package: Path, folder: Path, *, without: Collection[str]) -> None:
    """A package as links to its files, without some of its folders."""
    folder.mkdir()
    for each in package.iterdir():
        if each.name not in without:
            (folder / each.name).symlink_to(each)


def copy_all(home: Path, without: Collection[str]) -> dict[str, str]:
    """The packages without some slices, and the environment that imports them."""
    copy(ROOT / "cli/kdist", home / "kdist", without=without)
    copy(ROOT / "trainer/kdist_trainer", home / "kdist_trainer", without=OF_THE_TRAINER)
    (home / "job.yaml").write_text(JOB)
    return {**os.environ, "PYTHONPATH": str(home), "NO_COLOR": "1", "KUBECONFIG": "/dev/null"}


def type_commands(home: Path, without: Collection[str], *lines: Sequence[str]) -> list[Any]:
    """Exit code and output of each command line, without some slices."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)],
        env=copy_all(home, without),
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("name", SLICES)
def test_without_a_slice_all_other_modules_and_commands_work(name: str, tmp_path: Path) -> None:
    words = {"crd": ["explain", "-o", "crd"], "tensorboard": ["port-forward", "x", "tensorboard"]}
    deleted = words.get(name, [COMMANDS.get(name, name)])
    shown, refused, valid, rendered = type_commands(
        tmp_path, [name], ["--help"], deleted, ["validate", "job.yaml"], ["render", "job.yaml"]
    )
    listed = {line.split()[0] for line in shown[1].splitlines() if line.startswith("  ")}
    others = set(slices.COMMANDS) - {COMMANDS.get(name)}
    assert shown[0] == 0
    assert listed & set(slices.COMMANDS) == others
    assert refused[0] in (1, 2)
    has_no_words = name in COMMANDS or name == "api"
    assert ("there is no command" if has_no_words else f"no package kdist.{name}") in refused[1]
    assert valid[0] == rendered[0] == 0, (valid, rendered)
    assert "kind: Job" in rendered[1]


@pytest.mark.sampled
@pytest.mark.processes
def test_the_core_alone_trains(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kdist", "run", "job.yaml"],
        env=copy_all(tmp_path, SLICES),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "digits is done." in done.stderr


def test_every_slice_has_a_layer_of_its_own_above_the_commands() -> None:
    contracts = (ROOT / "pyproject.toml").read_text()
    assert f'    "{" | ".join(f"({name})" for name in SLICES)}",\n    "(commands)",\n' in contracts


def test_tests_of_the_core_import_no_slice() -> None:
    imports = re.compile(
        rf"^\s*(?:from|import) kdist\.({'|'.join(SLICES)})\b"
        rf"|^\s*from kdist import .*\b({'|'.join(SLICES)})\b",
        re.MULTILINE,
    )
    rooms = {path: path.relative_to(ROOT).parts for path in python_files("tests")}
    core = [path for path, room in rooms.items() if room[1] == "cli" and room[2] not in SLICES]
    assert len(core) > 50
    # the screens are the tables of all commands
    assert {path.name for path in core if imports.search(path.read_text())} == {"test_screens.py"}
