"""Cells of a notebook, and an empty folder to work in."""

from __future__ import annotations

import linecache
import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kdist.job.local.job import LocalJob

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
        exec(compile(source, file, "exec"), vars(main))  # noqa: S102 - as a notebook does
        return vars(main)

    return run
