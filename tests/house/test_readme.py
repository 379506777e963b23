"""The README shows commands that exist and that some test runs, and links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.readme import README, RUN_ELSEWHERE, commands, typed, typed_on_a_cluster
from tests.house.test_commands import LINES
from tests.house.test_make import TARGETS
from tests.house.tree import ROOT, files

PAGES = [path for path in files() if path.suffix == ".md"]


def test_the_readme_shows_its_two_commands() -> None:
    assert {"make demo", "make test"} <= set(commands(README.read_text()))


@pytest.mark.parametrize("line", commands(README.read_text()) if README.exists() else [])
def test_a_command_of_the_readme_exists(line: str) -> None:
    program, *rest = line.split()
    assert program in {"make", "kdist", "git", "cd", "torchrun", "curl", "python", "export"}
    if program in {"make", "kdist"}:
        assert rest[0] in (TARGETS if program == "make" else set(LINES) | {"--help", "--version"})


@pytest.mark.parametrize("line", RUN_ELSEWHERE)
def test_a_command_that_the_end_to_end_tier_leaves_out_is_run_where_the_table_says(
    line: str,
) -> None:
    assert (ROOT / RUN_ELSEWHERE[line]).exists()
    assert line.split()[-1] in (ROOT / RUN_ELSEWHERE[line]).read_text()


def test_the_end_to_end_tier_types_at_least_one_run_of_a_job() -> None:
    assert any(line.startswith("kdist run") for line in typed())


def test_the_session_on_a_cluster_sends_a_job_and_takes_it_away() -> None:
    verbs = [line.split()[1] for line in typed_on_a_cluster() if line.startswith("kdist")]
    assert (verbs[0], verbs[-1]) == ("apply", "delete")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_commands_are_read_off_console_blocks_alone() -> None:
    text = (
        "```console\n$ make demo  # first\noutput $ no\n$ kdist run \\\n  job.yaml\n```\n"
        "```yaml\n$ x\n```\n"
    )
    assert commands(text) == ["make demo", "kdist run    job.yaml"]
