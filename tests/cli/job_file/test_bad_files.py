"""Every malformed job file in `bad/` is reported exactly as in the `.txt` next to it: line, column,
path, suggestion.

`KDIST_REGENERATE=1 pytest tests/cli/job_file/test_bad_files.py` writes the `.txt` files again, to
be read before they are committed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kdist.errors import Code
from tests.cli.conftest import Kdist

BAD = Path(__file__).parent / "bad"
FILES = sorted(BAD.glob("*.yaml"))


def test_there_are_many_of_them() -> None:
    assert len(FILES) >= 100
    assert {file.stem for file in FILES} == {file.stem for file in BAD.glob("*.txt")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_bad_file_is_reported_with_place_path_reason_and_way_out(
    file: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BAD)
    result = kdist("validate", file.name)
    expected = file.with_suffix(".txt")
    if os.environ.get("KDIST_REGENERATE"):
        expected.write_text(result.stderr)
    assert result.exit_code == Code.USAGE
    assert result.stdout == ""
    assert result.stderr == expected.read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_problems_come_in_the_order_of_their_places_and_point_into_the_file(file: Path) -> None:
    lines = file.read_text().splitlines() or [""]
    found = re.findall(
        rf"^{re.escape(file.name)}:(\d+):(\d+): ",
        file.with_suffix(".txt").read_text(),
        re.MULTILINE,
    )
    places = [(int(line), int(column)) for line, column in found]
    assert places
    assert places == sorted(places)
    assert all(
        1 <= line <= len(lines) and 1 <= column <= len(lines[line - 1]) + 1
        for line, column in places
    )


@pytest.mark.parametrize("name", ["many-at-once", "python-tag", "tab-indentation"])
@pytest.mark.sampled
def test_a_real_process_says_the_same_and_exits_with_2(name: str) -> None:
    command = [sys.executable, "-m", "kdist", "validate", f"{name}.yaml"]
    ended = subprocess.run(
        command, cwd=BAD, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == Code.USAGE
    assert ended.stdout == ""
    assert ended.stderr == (BAD / f"{name}.txt").read_text()
