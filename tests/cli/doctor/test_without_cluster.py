"""`kdist doctor` on a machine that no kubeconfig connects to a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kdist.app import cli
from kdist.errors import Code


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", *arguments])


@pytest.fixture(autouse=True)
def no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


def test_a_laptop_without_a_cluster_is_healthy() -> None:
    done = doctor()
    assert done.exit_code == Code.OK, done.output
    assert "no kubeconfig: local runs only" in done.output


@pytest.mark.parametrize("arguments", [("-n", "ml"), ("--context", "prod")])
def test_a_cluster_that_was_asked_for_and_is_missing_is_a_failure(
    arguments: tuple[str, str],
) -> None:
    done = doctor(*arguments)
    assert done.exit_code == Code.ERROR
    assert "there is no kubeconfig" in done.output
