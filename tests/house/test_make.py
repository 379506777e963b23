"""The Makefile: every command is listed, set-up says clearly what it lacks, nothing is done twice,
scripts are clean.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.tree import ROOT, files

# Those that a script is likely to call; what they are called must not be given to a function.
COREUTILS = re.compile(
    "cat|chmod|chown|comm|cp|cut|date|df|du|env|expand|fold|head|id|install|join|link|ln|ls|mkdir|mktemp|mv|paste|rm|seq|sort|split"
    "|stat|sum|sync|tac|tail|tee|timeout|touch|tr|uniq|wc|who"
)
TESTS = ROOT / "tests"
TARGETS = {
    "help",
    "setup",
    "demo",
    "test",
    "chaos",
    "e2e",
    "disruptive",
    "compat",
    "acceptance",
    "lint",
    "bench",
    "docs",
    "generate",
    "clean",
    "lock",
    "pictures",
    "slices",
    "soak",
}


def make(*args: str) -> subprocess.CompletedProcess[str]:
    """Run make in the repository, as if no other make had started these tests."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        ["make", *args], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_help_lists_every_command_with_a_sentence() -> None:
    listed = dict(re.findall(r"^(\S+)\s+(\S.*)$", make("help").stdout, re.MULTILINE))
    assert set(listed) == TARGETS
    assert make().stdout == make("help").stdout


def test_a_python_that_is_too_old_is_named_before_anything_is_made(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make("setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert f"kdist needs Python 3.11 or newer, and {old} is not" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_set_up_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".ready").touch()
    expected = "make: Nothing to be done for 'setup'.\n"
    assert make("setup", f"VENV={tmp_path}", "PYTHON=false").stdout == expected


def test_a_new_lock_asks_for_a_new_set_up(tmp_path: Path) -> None:
    (tmp_path / ".ready").touch()
    plan = make("--dry-run", "--what-if=requirements.txt", "setup", f"VENV={tmp_path}").stdout
    assert re.search(r"uv pip sync .*--require-hashes .*requirements\.txt", plan)


SCRIPTS = [
    path
    for path in files()
    if path.suffix == ".sh" or path.read_bytes()[:64].split(b"\n")[0].endswith((b"bash", b"/sh"))
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_shell_script_stops_at_its_first_error_and_is_clean(
    script: Path, program: Callable[[str], str]
) -> None:
    assert "set -euo pipefail" in script.read_text() or script.read_text().startswith(
        "#!/bin/sh\nset -eu\n"
    )
    done = subprocess.run(
        [program("shellcheck"), script], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_function_of_a_script_hides_no_program(script: Path) -> None:
    names = re.findall(r"^([a-z_]+)\(\) [{(]", script.read_text(), re.MULTILINE)
    assert [name for name in names if COREUTILS.fullmatch(name)] == []


@pytest.mark.parametrize(
    ("first", "then", "again", "tries", "ends_well"),
    [
        (0, 9, "1", 1, True),
        (1, 0, "1", 2, True),
        (1, 1, "1", 2, False),
        (1, 5, "1", 2, False),  # no test to be tried
        (2, 0, "1", 1, False),  # interrupted: who knows what did not run
        (1, 0, "", 1, False),
    ],
)
def test_what_failed_is_tried_once_more_where_that_is_asked_for(
    first: int, then: int, again: str, tries: int, ends_well: bool, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ready").touch()
    python = tmp_path / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/tries\n[ "$(wc -l <{tmp_path}/tries)" = 1 ] && '
        f"exit {first}\nexit {then}\n"
    )
    python.chmod(0o755)
    assert (make("fast", f"VENV={tmp_path}", f"AGAIN={again}").returncode == 0) == ends_well
    calls = (tmp_path / "tries").read_text().splitlines()
    assert len(calls) == tries
    assert ["--last-failed --last-failed-no-failures none -n 0" in call for call in calls] == [
        False,
        True,
    ][:tries]


def test_a_tier_prints_its_name_instead_of_a_command_with_many_files(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ready").touch()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho $KDIST_SEEDS seeds\n")
    python.chmod(0o755)
    printed = make("chaos", "--assume-old=system", "KDIST_SEEDS=3", f"VENV={tmp_path}").stdout
    assert printed == "pytest, tier chaos\n3 seeds\n"


@pytest.mark.parametrize("tier", ["chaos", "e2e", "disruptive", "acceptance"])
def test_a_tier_reads_every_file_that_has_tests_of_it(tier: str, tmp_path: Path) -> None:
    (tmp_path / ".ready").touch()
    plan = make("--dry-run", tier, f"VENV={tmp_path}").stdout
    (paths,) = set(re.findall(rf'tiers/{tier}\.xml .*? -o testpaths="([^"]+)"', plan))
    read = {ROOT / path for path in paths.split()}
    sources = [path for path in files() if path.suffix == ".py" and path.is_relative_to(TESTS)]
    marked = [path for path in sources if f"mark.{tier}" in path.read_text()]
    assert marked
    assert [path for path in marked if not read & {path, path.parent}] == []


def test_marks_are_written_where_a_tier_finds_its_files() -> None:
    sources = [path for path in files() if path.suffix == ".py" and path.is_relative_to(TESTS)]
    aliases = re.compile(
        r"from pytest import .*\bmark\b|= pytest\.mark$|getattr\(pytest\.mark", re.MULTILINE
    )
    found = [path.name for path in sources if aliases.search(path.read_text())]
    assert found == [Path(__file__).name]
