"""`kdist version` names the server's version, and does without it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from kdist.commands import version
from kdist.errors import Code
from tests.cli.cluster.api import Asked, Reply, write_kubeconfig
from tests.cli.cluster.conftest import Serve, _hurry, serve
from tests.cli.conftest import Kdist

__all__ = ["_hurry", "serve"]

CLIENT = ["kdist", "python", "kdist-trainer", "torch"]


@pytest.fixture(autouse=True)
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test may write a kubeconfig."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return tmp_path / "config"


def answer(asked: Asked) -> Reply:
    """The version, as an API server says it."""
    assert asked.path == "/version"
    return Reply(document={"major": "1", "minor": "31", "gitVersion": "v1.31.4"})


def names(text: str) -> list[str]:
    """The first word of each line."""
    return [line.split()[0] for line in text.splitlines()]


def test_the_version_of_the_server_follows_those_of_this_machine(
    kdist: Kdist, kubeconfig: Path, serve: Serve
) -> None:
    api = serve(answer)
    write_kubeconfig(kubeconfig, api.url)
    shown = kdist("version")
    assert (names(shown.stdout), shown.stderr) == ([*CLIENT, "server"], "")
    assert shown.stdout.endswith("\nserver v1.31.4\n")
    assert json.loads(kdist("version", "-o", "json").stdout)["server"] == "v1.31.4"
    asked = len(api.asked)
    assert names(kdist("version", "--client").stdout) == CLIENT
    assert len(api.asked) == asked, "--client asks nobody"


def test_without_a_kubeconfig_only_this_machine_is_described(kdist: Kdist) -> None:
    shown = kdist("version")
    assert (names(shown.stdout), shown.stderr, shown.exit_code) == (CLIENT, "", Code.OK)


def test_a_server_that_refuses_connections_costs_a_warning(kdist: Kdist, kubeconfig: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_kubeconfig(kubeconfig, f"http://127.0.0.1:{port}")
    shown = kdist("version")
    assert (names(shown.stdout), shown.exit_code) == (CLIENT, Code.OK)
    assert shown.stderr.count("\n") == 1
    assert shown.stderr.startswith("Warning: the server's version is not known: the API server at")
    assert "connection refused" in shown.stderr


def test_a_server_that_stays_silent_is_not_waited_for(
    kdist: Kdist, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        write_kubeconfig(kubeconfig, f"http://127.0.0.1:{server.getsockname()[1]}")
        shown = kdist("version")
    assert (names(shown.stdout), shown.exit_code) == (CLIENT, Code.OK)
    assert "Warning: the server's version is not known" in shown.stderr
