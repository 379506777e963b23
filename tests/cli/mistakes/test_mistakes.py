"""What users see after each mistake of `cases.py`: what is wrong, where, and what to do next, as in
the file `GROUP.txt`.

`KDIST_REGENERATE=1 pytest tests/cli/mistakes/test_mistakes.py` writes the texts again, to be read
before they are committed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import documents
from tests.cli.conftest import Kdist
from tests.cli.mistakes.cases import FILES, MISTAKES

HERE = Path(__file__).parent
WAY_OUT = re.compile(r"^ *(Hint|hint|Next): \S|did you mean ", re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with the files of all cases, and no kubeconfig."""
    root = tmp_path / "work"
    for name, content in FILES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    (root / "loop.yaml").symlink_to("loop.yaml")
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("KUBECONFIG", "KDIST_HOME"):
        monkeypatch.delenv(name, raising=False)
    return root


def split(typed: str) -> tuple[dict[str, str], list[str]]:
    """Variables and arguments of what is typed."""
    words = shlex.split(typed)
    variables = [each for each in words[:1] if each.startswith("KDIST_")]
    return dict(each.split("=", 1) for each in variables), words[len(variables) :]


def hide_paths(text: str, folder: Path) -> str:
    return text.replace(str(folder), "/trial").replace(str(folder.resolve()), "/trial")


def as_recorded(typed: str, code: int, text: str) -> str:
    start = " ".join(f"{key}={value}" for key, value in split(typed)[0].items())
    words = " ".join(["$", *start.split(), "kdist", typed.removeprefix(start).strip()])
    return f"{words}\n{text}[exit {code}]\n"


def recorded(group: str) -> dict[str, str]:
    """Each command of a group with what it prints."""
    file = HERE / f"{group}.txt"
    parts = file.read_text().split("\n\n") if file.exists() else []
    return {part.partition("\n")[0]: part.strip("\n") + "\n" for part in parts}


CASES = [(group, typed, code) for group, cases in MISTAKES.items() for typed, code in cases]


def test_there_are_at_least_60_of_them() -> None:
    assert len({typed for _, typed, _ in CASES}) >= 60


@pytest.mark.parametrize("group", MISTAKES)
def test_every_mistake_names_what_where_and_the_way_out(
    group: str, kdist: Kdist, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    wrong = []
    for typed, code in MISTAKES[group]:
        variables, words = split(typed)
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            result = kdist(*words)
        text = hide_paths(result.stderr, folder)
        texts.append(as_recorded(typed, result.exit_code, text))
        if result.exit_code != code or result.stdout or not WAY_OUT.search(text):
            wrong.append(texts[-1])
    file = HERE / f"{group}.txt"
    if os.environ.get("KDIST_REGENERATE"):
        file.write_text("\n".join(texts))
    assert wrong == []
    assert "\n".join(texts) == file.read_text()


@pytest.mark.parametrize("group", MISTAKES)
def test_a_program_finds_the_way_out_in_the_json(
    group: str, kdist: Kdist, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = []
    for typed, code in MISTAKES[group]:
        variables, (command, *words) = split(typed)
        if "-o" in words:
            continue
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            result = kdist(command, "-o", "json", *words)
        (document,) = documents.read(result.stdout)
        (found,) = document.get("files", [document])
        assert result.exit_code == code == document.get("exitCode", code)
        ways = {"hint", "nextCommand", "suggestion"}
        if not any(each.get(way) for each in (found, *found["problems"]) for way in ways):
            without.append((typed, document))
    assert without == []


@pytest.mark.processes
@pytest.mark.parametrize(
    "typed",
    ["validate no-colon.yaml", "run broken.py", "run job.yaml --nodes 2:1", "run class.yaml"],
)
@pytest.mark.sampled
def test_a_real_process_says_the_same(typed: str, folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kdist", *typed.split()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    text = as_recorded(typed, ended.returncode, hide_paths(ended.stderr, folder))
    assert text in {part for group in MISTAKES for part in recorded(group).values()}
