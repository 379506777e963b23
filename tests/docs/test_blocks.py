"""Every block of code in the documentation is run, is parsed, or says why it is not."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Kdist
from tests.cli.conftest import kdist as kdist
from tests.cluster.test_pages import SESSIONS
from tests.docs.blocks import DOCS, PAGES, Block, blocks, where
from tests.house.test_commands import LINES
from tests.house.tree import ROOT

FOUND = [(page, block) for page in PAGES for block in blocks(page.read_text())]
MARKS = re.compile(r"not run: \S.*|on a cluster|run by: \S+|file: [\w.-]+")


def of(*languages: str) -> list[object]:
    """The blocks of these languages that are run, as parameters of a test."""
    return [
        pytest.param(block, id=where(page, block))
        for page, block in FOUND
        if block.language in languages and block.is_run
    ]


def test_a_mark_is_one_of_four_and_names_a_test_that_exists() -> None:
    marked = ("not run", "run", "on a", "file")
    comments = [(page, b) for page, b in FOUND if b.mark.startswith(marked)]
    assert [where(page, b) for page, b in comments if not MARKS.fullmatch(b.mark)] == []
    named = [b.mark.split()[2] for _, b in FOUND if b.mark.startswith("run by:")]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_that_needs_a_cluster_is_typed_on_one() -> None:
    marked = [(page, block) for page, block in FOUND if block.on_a_cluster]
    assert marked
    assert [where(page, block) for page, block in marked if not block.commands] == []
    assert sorted(SESSIONS) == sorted({str(page.relative_to(DOCS)) for page, _ in marked})


def test_no_block_kills_a_process_whose_number_may_be_0_or_missing() -> None:
    """`kill -9 0` ends the reader's own shell, and a rank of a plain script notes 0."""
    kills = re.compile(r"\bkill\b.*(?:\$\(|`)")
    assert [where(page, block) for page, block in FOUND if kills.search(block.text)] == []


def test_shells_have_one_name() -> None:
    other = {"sh", "shell", "yml", "py", "zsh"}
    assert [where(page, block) for page, block in FOUND if block.language in other] == []


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_parses_and_a_job_is_valid(block: Block, kdist: Kdist, tmp_path: Path) -> None:
    documents = list(yaml.safe_load_all(block.text))
    assert documents
    kinds = [each.get("kind") for each in documents if isinstance(each, dict)]
    if "TrainingJob" in kinds:
        (tmp_path / "job.yaml").write_text(block.text)
        for name in ("train.py", "workload.py", "my_workload.py"):
            (tmp_path / name).touch()
        result = kdist("validate", str(tmp_path / "job.yaml"))
        assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("block", of("python"))
def test_a_block_of_python_compiles(block: Block) -> None:
    assert ast.parse(block.text).body


def test_every_script_of_a_shell_parses(program: Callable[[str], str]) -> None:
    scripts = [(page, block) for page, block in FOUND if block.language == "bash"]
    tried = [
        (where(page, block), subprocess.run([program("bash"), "-nc", block.text], check=False))
        for page, block in scripts
    ]
    assert [name for name, done in tried if done.returncode] == []


@pytest.mark.parametrize("block", of("console"))
def test_a_session_types_commands_of_kdist_that_exist(block: Block) -> None:
    assert block.commands
    called = re.findall(r"(?:^|[|;&] *)kdist +([a-z-]+)", "\n".join(block.commands), re.MULTILINE)
    assert [name for name in called if name not in {*LINES, "--help", "--version"}] == []


def test_blocks_are_read_with_their_marks(tmp_path: Path) -> None:
    text = (
        "a\n\n<!-- not run: it needs a GPU -->\n```console\n$ kdist run \\\n  x\nout\n$ ls\n```\n"
        "- b\n  ```yaml\n  a: 1\n  ```\n\n```\nplain\n```\n"
        "<!-- file: a.py -->\n```python\nprint('$HOME')\n```\n"
    )
    session, nested, written = blocks(text)
    assert (session.is_run, session.line) == (False, 4)
    assert session.commands == ["kdist run \\\n  x", "ls"]
    assert (nested.language, nested.text, nested.is_run) == ("yaml", "a: 1\n", True)
    assert nested.commands == []
    typed = [*written.commands, "cat a.py"]
    shell = subprocess.run(
        ["bash", "-euc", "\n".join(typed)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shell.stdout == written.text
