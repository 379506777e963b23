"""Cells of a notebook, an empty folder to work in, and what the code of a job prints or why there
is none.
"""

from __future__ import annotations

import linecache
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kdist
from kdist.errors import UsageError
from kdist.job.local.job import LocalJob
from kdist.spec import CodeSource

Cells = Callable[[str], dict[str, Any]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, in which runs are below `.kdist`; none outlives its test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    yield tmp_path
    for each in (tmp_path / ".kdist").glob("*/run.json"):
        if (pid := LocalJob(each.parent).pid) is not None:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cells:
    """Run the source of a cell as IPython does: in the main module, with its lines in Python's
    cache. Returns the names of the notebook.
    """
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    numbers = count()

    def run(source: str) -> dict[str, Any]:
        file = f"<ipython-input-{next(numbers)}>"
        lines = source.splitlines(keepends=True)
        linecache.cache[file] = (len(source), None, lines, file)
        code = compile(source, file, "exec", dont_inherit=True)
        exec(code, vars(main))  # noqa: S102 - as a notebook does
        return vars(main)

    return run


def folder(job: kdist.JobDefinition) -> Path:
    """Where its code is."""
    code = job.job.spec.code
    assert isinstance(code, CodeSource)
    return Path(str(code.path))


def output(job: kdist.JobDefinition) -> str:
    """What the job's script prints in a process of its own, somewhere else."""
    script = job.job.spec.script
    assert script is not None
    file = folder(job) / str(script.path)
    done = subprocess.run(
        [sys.executable, str(file)], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + file.read_text()
    return done.stdout


def on_ranks(names: dict[str, Any]) -> str:
    """What the notebook's `train` prints there."""
    return output(kdist.from_code(names["train"]))


def refusal(names: dict[str, Any]) -> UsageError:
    """Why the notebook's `train` cannot be sent."""
    with pytest.raises(UsageError) as caught:
        kdist.from_code(names["train"])
    return caught.value
