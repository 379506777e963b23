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
ROOTS = (ROOT, ROOT / "cli", ROOT / "trainer", ROOT / "controller")
FOLDERS = "tests|bench|tools|cli|trainer|controller|charts|manifests|examples"
NAMED = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*[\w/]")
STARTED = re.compile(r"python3? -m ((?:bench|tests|tools|kdist\w*)(?:\.\w+)*)")
STEMS = {path.name.partition(".")[0] for path in files()} | {
    part for path in files() for part in path.relative_to(ROOT).parts[:-1]
}


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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_or_a_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    if page.name == "CHANGELOG.md":  # what is older was so then
        text = text.partition("\n## Unreleased")[2].partition("\n## ")[0]
    absent = [
        name
        for name in NAMED.findall(text)
        if not ((ROOT / name).exists() or any(ROOT.glob(f"{name}.*")))
    ]
    for module in STARTED.findall(text):
        path = module.replace(".", "/")
        if not any((root / path).is_dir() or (root / f"{path}.py").exists() for root in ROOTS):
            absent.append(module)
    assert absent == []


def test_each_module_on_the_map_exists() -> None:
    map_ = README.read_text().partition("## The map")[2].partition("```text")[2].partition("```")[0]
    named = set(re.findall(r"\b[a-z]+_[a-z_]+\b", map_))
    assert len(named) > 20
    assert named - STEMS == set()


def test_commands_are_read_off_console_blocks_alone() -> None:
    text = (
        "```console\n$ make demo  # first\noutput $ no\n$ kdist run \\\n  job.yaml\n```\n"
        "```yaml\n$ x\n```\n"
    )
    assert commands(text) == ["make demo", "kdist run    job.yaml"]
