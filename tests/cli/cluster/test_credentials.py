"""Credentials that a plugin gives: asked for again before they end and when the server refuses
them, and what a failure says.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kdist.cluster import kubeconfig
from kdist.errors import Code, KdistError
from tests.cli.cluster.api import Reply, refusal, write_kubeconfig
from tests.cli.cluster.conftest import Connect, Serve

VERSION = "client.authentication.k8s.io/v1"
COUNTING = """
import json, os, pathlib
count = pathlib.Path(os.environ["COUNT"])
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
status = json.loads(os.environ["STATUS"])
status = {key: value.replace("N", str(number)) if key == "token" else value \
for key, value in status.items()}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", \
"status": status}))
"""

User = Callable[..., dict[str, Any]]


@pytest.fixture
def plugin(tmp_path: Path) -> User:
    """`plugin(source, **fields)` is a user of a kubeconfig whose credentials come from a program,
    as clouds have it.
    """

    def make(source: str, env: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        file = tmp_path / "credentials"
        file.write_text(f"#!{sys.executable}\n{source}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        variables = [{"name": name, "value": value} for name, value in (env or {}).items()]
        asked: dict[str, Any] = {"apiVersion": VERSION, "command": str(file), "env": variables}
        return {"exec": {**asked, "interactiveMode": "Never", **fields}}

    return make


def test_a_token_is_asked_for_again_before_it_ends(
    plugin: User, tmp_path: Path, serve: Serve, connect: Connect
) -> None:
    soon = (datetime.now(UTC) + timedelta(seconds=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = json.dumps({"token": "number-N", "expirationTimestamp": soon})
    env = {"COUNT": str(tmp_path / "count"), "STATUS": status}
    api = serve(lambda _: Reply())
    found = connect(api.url, user=plugin(COUNTING, env))
    found.version()
    found.version()
    tokens = [each.headers["authorization"] for each in api.asked]
    assert len(set(tokens)) == 2
    assert all(each.startswith("Bearer number-") for each in tokens)


def test_a_token_is_kept_while_it_is_good(
    plugin: User, tmp_path: Path, serve: Serve, connect: Connect
) -> None:
    env = {"COUNT": str(tmp_path / "count"), "STATUS": json.dumps({"token": "number-N"})}
    api = serve(lambda _: Reply())
    found = connect(api.url, user=plugin(COUNTING, env))
    found.version()
    found.version()
    assert (tmp_path / "count").read_text() == "1"


def test_a_token_that_the_server_refuses_is_asked_for_again_once(
    plugin: User, tmp_path: Path, serve: Serve, connect: Connect
) -> None:
    env = {"COUNT": str(tmp_path / "count"), "STATUS": json.dumps({"token": "number-N"})}
    refused = refusal(401, "Unauthorized")
    second = "Bearer number-2"
    api = serve(lambda asked: Reply() if asked.headers["authorization"] == second else refused)
    connect(api.url, user=plugin(COUNTING, env)).version()
    api.answer = lambda _: refused
    with pytest.raises(KdistError, match="does not know who you are"):
        connect(api.url, user=plugin(COUNTING, env)).version()


def test_a_certificate_that_has_ended_is_exchanged(plugin: User, tmp_path: Path) -> None:
    status = {"clientCertificateData": "certificate", "clientKeyData": "key"}
    status["expirationTimestamp"] = "2020-01-01T00:00:00Z"
    file, count = tmp_path / "kubeconfig", tmp_path / "count"
    user = plugin(COUNTING, {"COUNT": str(count), "STATUS": json.dumps(status)})
    write_kubeconfig(file, "https://127.0.0.1:1", user=user)
    source = kubeconfig.load(file=str(file)).credentials
    assert (source.get().certificate, source.get().key) == ("certificate", "key")
    assert count.read_text() == "2"


SHOWING = """
import json, os, pathlib
folder = pathlib.Path(os.environ["FOLDER"])
number = len(list(folder.glob("run-*"))) + 1
(folder / f"run-{number}").touch()
pem = (folder / f"{number}.pem").read_text()
key, _, certificate = pem.partition("-----BEGIN CERTIFICATE-----")
status = {"clientCertificateData": f"-----BEGIN CERTIFICATE-----{certificate}", \
"clientKeyData": key}
status["expirationTimestamp"] = "2020-01-01T00:00:00Z"
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", \
"status": status}))
"""


def test_connections_show_the_certificate_that_the_plugin_gave_last(
    plugin: User, tmp_path: Path, serve: Serve, connect: Connect, program: Callable[[str], str]
) -> None:
    for name in ("server", "1", "2", "3"):
        words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        words += ["-nodes", "-subj", f"/CN={name}"]
        words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key", "-out", "crt"]
        subprocess.run([program("openssl"), *words], capture_output=True, check=True, cwd=tmp_path)
        both = (tmp_path / "key").read_bytes() + (tmp_path / "crt").read_bytes()
        (tmp_path / f"{name}.pem").write_bytes(both)
    every = tmp_path / "every"
    every.write_bytes(b"".join((tmp_path / f"{name}.pem").read_bytes() for name in ("1", "2", "3")))
    api = serve(lambda _: Reply(), certificate=tmp_path / "server.pem", clients=every)
    user = plugin(SHOWING, {"FOLDER": str(tmp_path)})
    trusted = {"certificate-authority": str(tmp_path / "server.pem")}
    found = connect(api.url, user=user, cluster=trusted)
    found.version()
    found.version()
    assert [each.shown for each in api.asked] == ["2", "3"]


def test_a_plugin_that_fails_is_reported_with_its_command_its_words_and_where_to_get_it(
    plugin: User, connect: Connect
) -> None:
    source = "import sys; sys.exit('your login has expired, run: cloud login')"
    hint = "get it from cloud.example"
    user = plugin(source, args=["token", "--cluster=a"], installHint=hint)
    with pytest.raises(KdistError, match="your login has expired, run: cloud login") as raised:
        connect("http://127.0.0.1:1", user=user)
    assert raised.value.code == Code.UNREACHABLE
    printed = "credentials token --cluster=a` of the kubeconfig: it ended with code 1"
    assert printed in str(raised.value)
    assert raised.value.hint == hint


NEITHER = "neither a token nor a certificate"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("print('hello')", "it does not answer with an ExecCredential"),
        (f'print(\'{{"apiVersion": "{VERSION}", "status": {{}}}}\')', NEITHER),
        ('print(\'{"apiVersion": "v0", "status": {"token": "a"}}\')', "it answers in v0, not in"),
        ('print(\'{"status": {"token": "a", "expirationTimestamp": "soon"}}\')', "ExecCredential"),
        ("", "it does not answer with an ExecCredential"),
    ],
)
def test_so_is_one_whose_answer_cannot_be_used(
    source: str, why: str, plugin: User, connect: Connect
) -> None:
    with pytest.raises(KdistError, match="of the kubeconfig: ") as raised:
        connect("http://127.0.0.1:1", user=plugin(source))
    assert why in str(raised.value)


def test_so_is_one_that_is_not_there(plugin: User, connect: Connect) -> None:
    user = plugin("", command="no-such-login", installHint="brew install it")
    printed = "`no-such-login` of the kubeconfig: it cannot be started: No such file"
    with pytest.raises(KdistError, match=printed) as raised:
        connect("http://127.0.0.1:1", user=user)
    assert raised.value.hint == "brew install it"


def test_a_plugin_that_needs_a_terminal_is_not_run_without_one(
    plugin: User, connect: Connect
) -> None:
    with pytest.raises(KdistError, match="it needs a terminal"):
        connect("http://127.0.0.1:1", user=plugin("", interactiveMode="Always"))


def test_a_plugin_is_reported_the_cluster_where_it_asks(
    plugin: User, tmp_path: Path, serve: Serve, connect: Connect
) -> None:
    reported = tmp_path / "told"
    write = f"open({str(reported)!r}, 'w').write(os.environ['KUBERNETES_EXEC_INFO'])"
    source = f"import os; {write}; {COUNTING}"
    env = {"COUNT": str(tmp_path / "count"), "STATUS": json.dumps({"token": "a"})}
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "here"}}
    api = serve(lambda _: Reply())
    user = plugin(source, env, provideClusterInfo=True)
    connect(api.url, user=user, cluster={"extensions": [extension]}).version()
    about = {"server": api.url, "config": {"audience": "here"}}
    assert json.loads(reported.read_text())["spec"] == {"interactive": False, "cluster": about}


@pytest.mark.parametrize("token", ["secret\r\nX-Other: 1", "secret\x00", "sécret"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(
    token: str, connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(token, encoding="utf-8")
    for user in ({"token": token}, {"tokenFile": str(tmp_path / "token")}):
        with pytest.raises(KdistError, match="characters that no header can hold") as raised:
            connect("http://127.0.0.1:1", user=user)
        assert "cret" not in str(raised.value)


@pytest.mark.parametrize("field", ["tokenFile", "client-certificate"])
def test_a_file_that_never_ends_or_is_none_is_refused(
    field: str, connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(b"x" * (2 << 20))
    os.mkfifo(tmp_path / "pipe")
    for file in ("/dev/zero", str(tmp_path / "large"), str(tmp_path / "pipe"), str(tmp_path)):
        with pytest.raises(
            KdistError, match=r"no regular file|larger than 1 MiB|[Ii]s a directory"
        ):
            connect("http://127.0.0.1:1", user={field: file})
