"""Whom kdist talks to, and as whom: contexts, plugins for credentials, and what is wrong with a kubeconfig."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from kdist import cluster
from kdist.errors import Code, KdistError
from tests.cli.cluster.api import Reply, write_kubeconfig
from tests.cli.cluster.conftest import Connect, Serve


def plugin(folder: Path, source: str) -> dict[str, object]:
    """A user whose credentials come from a program, as clouds have it."""
    file = folder / "credentials"
    file.write_text(f"#!{sys.executable}\n{source}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(file), "interactiveMode": "Never"}}


def test_the_token_of_the_kubeconfig_is_sent(serve: Serve, connect: Connect) -> None:
    api = serve(lambda _: Reply())
    found = connect(api.url)
    found.version()
    assert api.asked[0].headers["authorization"] == "Bearer secret"
    assert (found.namespace, found.context, found.server) == ("ml", "test", api.url)


def test_a_plugin_gives_the_credentials(tmp_path: Path, serve: Serve, connect: Connect) -> None:
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "from-plugin"}}
    api = serve(lambda _: Reply())
    connect(api.url, user=plugin(tmp_path, f"print({json.dumps(json.dumps(credential))})")).version()
    assert api.asked[0].headers["authorization"] == "Bearer from-plugin"


def test_a_plugin_that_fails_is_said_in_its_own_words(tmp_path: Path, connect: Connect) -> None:
    user = plugin(tmp_path, "import sys; sys.exit('your login has expired, run: cloud login')")
    with pytest.raises(KdistError, match="your login has expired, run: cloud login") as raised:
        connect("http://127.0.0.1:1", user=user)
    assert raised.value.code == Code.UNREACHABLE


def test_a_context_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(KdistError, match="prod") as raised:
        cluster.connect("prod")
    assert raised.value.code == Code.UNREACHABLE


def test_without_a_kubeconfig_the_way_to_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(KdistError, match="there is no kubeconfig at") as raised:
        cluster.connect()
    assert "KUBECONFIG" in raised.value.hint


@pytest.mark.parametrize(
    "text", ["", "a: [", "just words", "apiVersion: v1\nkind: Config\n", "current-context: x\ncontexts: 7\n"]
)
def test_a_broken_kubeconfig_is_an_error_and_no_traceback(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(KdistError, match="the kubeconfig cannot be used") as raised:
        cluster.connect()
    assert str(file) in raised.value.hint


def test_several_files_are_one_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "one", "http://127.0.0.1:1")
    (tmp_path / "two").write_text("contexts: [{name: other, context: {cluster: c, user: u, namespace: elsewhere}}]\n")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'one'}:{tmp_path / 'two'}:{tmp_path / 'missing'}")
    assert cluster.connect("other").namespace == "elsewhere"
    assert cluster.connect().namespace == "ml"
    assert cluster.connect(namespace="mine").namespace == "mine"
