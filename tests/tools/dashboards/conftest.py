"""`python -m tools.dashboards` as a developer types it, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tools.dashboards.__main__ import main


class Finished(NamedTuple):
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


Tool = Callable[..., Finished]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    """Runs a command: `tool("verify", "--grafana", URL)`."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("KDIST_DEBUG", raising=False)

    def run(*args: str) -> Finished:
        with pytest.raises(SystemExit) as end:
            main(args)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Finished(int(end.value.code or 0), printed.out, printed.err)

    return run
