"""The command line: what is typed wrong, and a Prometheus that does not answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.tree import ROOT
from tests.tools.dashboards.conftest import Tool


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prometheus", "http://127.0.0.1:9"], 5, "does not answer"),
        (["--prometheus", "ftp://x"], 2, "is not an http address"),
        (["--prometheus", "http://127.0.0.1:9", "--since", "soon"], 2, "found `soon`"),
        (["--prometheus", "http://127.0.0.1:9", "--dashboard", "none"], 2, "training-job, fleet"),
        ([], 2, "--prometheus"),
    ],
)
def test_a_page_cannot_be_drawn_from_wrong_arguments_or_without_a_prometheus(
    tool: Tool, arguments: list[str], code: int, message: str
) -> None:
    finished = tool("preview", *arguments)
    assert finished.exit_code == code
    assert message in finished.stderr


def test_the_tools_run_from_a_checkout() -> None:
    command = [sys.executable, "-m", "tools.dashboards", "--help"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "preview" in printed
    assert "verify" in printed
