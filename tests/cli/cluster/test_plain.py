"""A kubeconfig with a certificate or a token is read without the official client, to whom all others are left."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist.cluster import kubeconfig, plain
from tests.cli.cluster.api import Reply
from tests.cli.cluster.conftest import Serve


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def write(folder: Path, *, user: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None) -> Path:
    """A kubeconfig with two contexts, of which `two` is in namespace `ml`."""
    document = {
        "current-context": "one",
        "contexts": [
            {"name": "one", "context": {"cluster": "c", "user": "u"}},
            {"name": "two", "context": {"cluster": "c", "user": "u", "namespace": "ml"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": "https://example.com:6443/", **(cluster or {})}}],
        "users": [{"name": "u", "user": {"token": "secret"} if user is None else user}],
    }
    file = folder / "config"
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.mark.parametrize("context", [None, "one", "two"])
def test_it_means_what_the_official_client_takes_it_for(
    context: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(write(tmp_path, cluster={"insecure-skip-tls-verify": True})))
    ours = kubeconfig.load(context)
    monkeypatch.setattr(plain, "read", lambda *_: None)
    theirs = kubeconfig.load(context)
    assert (ours.context, ours.namespace, ours.server) == (theirs.context, theirs.namespace, theirs.server)
    assert ours.headers() == theirs.headers() == {"authorization": "Bearer secret"}
    assert ours.official().host == theirs.official().host == "https://example.com:6443"


def test_certificates_may_be_in_it_or_in_files_beside_it(tmp_path: Path) -> None:
    pem = "-----BEGIN CERTIFICATE-----\n"
    (tmp_path / "a.pem").write_text(pem)
    beside = {"client-certificate": "a.pem", "client-key": str(tmp_path / "a.pem")}
    inside = {f"{name}-data": base64.b64encode(pem.encode()).decode() for name in beside}
    authority = base64.b64encode(b"authority").decode()
    first = plain.read(write(tmp_path, user=beside, cluster={"certificate-authority-data": authority}), None)
    second = plain.read(write(tmp_path, user=inside, cluster={"certificate-authority-data": authority}), None)
    assert first == second
    assert first is not None
    assert (first.certificate, first.key, first.authority, first.token) == (pem, pem, "authority", "")


@pytest.mark.parametrize(
    "user",
    [
        {"exec": {"command": "login"}},
        {"auth-provider": {"name": "oidc"}},
        {"username": "a", "password": "b"},
        {"token": "a", "tokenFile": "b"},
        {"token": 7},
        {"client-certificate-data": "%%%"},
        {"client-certificate": "not-there.pem"},
        "text",
    ],
)
def test_what_is_more_than_plain_or_wrong_is_left_to_the_official_client(user: Any, tmp_path: Path) -> None:
    assert plain.read(write(tmp_path, user=user), None) is None


@pytest.mark.parametrize("cluster", [{"proxy-url": "http://proxy:1"}, {"server": None}, {"a-field-of-tomorrow": 1}])
def test_so_are_clusters_that_are_more_than_plain(cluster: dict[str, Any], tmp_path: Path) -> None:
    assert plain.read(write(tmp_path, cluster=cluster), None) is None


def test_so_is_all_where_the_environment_names_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    assert plain.read(write(tmp_path), None) is None


ASK = """
import sys
import kdist.commands.get
from kdist import cluster, follow
cluster.connect().version()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"kubernetes", "requests", "oauthlib", "pydantic", "websocket"}))
"""


def test_a_request_by_a_plain_kubeconfig_imports_no_heavy_library(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = serve(lambda _: Reply())
    monkeypatch.setenv("KUBECONFIG", str(write(tmp_path, cluster={"server": api.url})))
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert api.asked[0].headers["authorization"] == "Bearer secret"
