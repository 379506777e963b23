"""The commit of a folder is git's, and no setting of its repository makes git run a program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kdist.job_file.commit import find_commit


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit."""
    folder = tmp_path / "jobs" / "one"
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text("a: 1\n")
    git(tmp_path / "jobs", "init", "-q")
    git(tmp_path / "jobs", "add", ".")
    git(tmp_path / "jobs", "commit", "-qm", "x")
    return folder


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    command = ["git", *settings, *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_folder_is_clean_until_a_tracked_file_differs(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook
    head = git(repository, "--git-dir=../.git", "rev-parse", "HEAD")
    (repository / "job.yaml").touch()
    (repository / "untracked").touch()
    assert find_commit(repository) == head
    (repository.parent / "more").write_text("")
    (repository / "job.yaml").write_text("a: 2\n")
    assert find_commit(repository) == f"{head}-dirty"


def test_a_worktree_has_a_commit_of_its_own(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "other"))
    git(tmp_path / "other", "commit", "-qm", "y", "--allow-empty")
    assert find_commit(tmp_path / "other") == git(tmp_path / "other", "rev-parse", "HEAD")
    assert find_commit(repository) != find_commit(tmp_path / "other")


def test_no_program_that_the_repository_names_is_run(repository: Path, tmp_path: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    mark, hook = tmp_path / "ran", tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    hook.chmod(0o755)
    (repository.parent / ".gitattributes").write_text("* filter=x diff=x\n")
    (repository.parent / ".git" / "info" / "attributes").write_text("* filter=x diff=x\n")
    for name in ("core.fsmonitor", "filter.x.clean", "diff.external", "diff.x.textconv"):
        git(repository, "config", name, str(hook))
    git(repository, "config", "core.hooksPath", str(tmp_path))
    (repository / "job.yaml").write_text("a: 3\n")
    mark.unlink(missing_ok=True)
    assert find_commit(repository) == f"{head}-dirty"
    assert not mark.exists()


def test_without_a_repository_nothing_is_known(tmp_path: Path) -> None:
    assert find_commit(tmp_path) == ""
    assert find_commit(tmp_path / "missing") == ""
    git(tmp_path, "init", "-q")
    assert find_commit(tmp_path) == ""  # no commit yet
