"""Whom kdist talks to, and as whom: contexts, files, impersonation, and what of a kubeconfig cannot
be honoured.
"""

from __future__ import annotations

import base64
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdist import cluster
from kdist.cluster import Impersonation, kubeconfig
from kdist.cluster.kubeconfig import Access
from kdist.errors import Code, KdistError, UsageError
from tests.cli.cluster.api import Api, Reply, refusal, write_kubeconfig
from tests.cli.cluster.conftest import Connect, Serve


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_the_token_of_the_kubeconfig_is_sent(serve: Serve, connect: Connect) -> None:
    api = serve(lambda _: Reply())
    found = connect(api.url)
    found.version()
    assert api.asked[0].headers["authorization"] == "Bearer secret"
    assert (found.namespace, found.context, found.server) == ("ml", "test", api.url)


AS = {
    "as": "anna",
    "as-uid": "7",
    "as-groups": ["ml", "lab 2"],
    "as-user-extra": {"acme.com/Project": ["a", "b"]},
}


def test_who_the_kubeconfig_says_to_act_as_is_said_with_every_request(
    serve: Serve, connect: Connect
) -> None:
    api = serve(lambda _: Reply())
    connect(api.url, user={"token": "secret", **AS}).version()
    sent = api.asked[0].headers
    assert sent["authorization"] == "Bearer secret"
    assert sent["impersonate-user"] == "anna"
    assert sent["impersonate-uid"] == "7"
    assert sent["impersonate-group"] == "ml, lab 2"
    assert sent["impersonate-extra-acme.com%2Fproject"] == "a, b"


def test_so_it_is_when_a_command_is_run_in_a_pod_or_a_port_is_forwarded(
    serve: Serve, connect: Connect
) -> None:
    api = serve(lambda _: refusal(403, "not you"))
    found = connect(api.url, user={"token": "secret", **AS})
    with pytest.raises(KdistError, match="not you"):
        found.exec("pod", ["true"])
    with pytest.raises(KdistError, match="not you"), found.session("pod", ["true"]):
        pass
    with found.forward("pod", 80) as port:
        _touch(port)
    assert [each.path.rpartition("/")[2] for each in api.asked] == ["exec", "exec", "portforward"]
    for each in api.asked:
        assert each.headers["impersonate-user"] == "anna"
        assert each.headers["impersonate-group"] == "ml, lab 2"
        assert each.headers["authorization"] == "Bearer secret"


def _touch(port: int) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", port)) as connection:
        assert connection.recv(1) == b""


def test_who_the_command_line_says_to_act_as_overrules_the_kubeconfig(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = serve(lambda _: Reply())
    write_kubeconfig(tmp_path / "elsewhere", api.url, user={"token": "secret", **AS})
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    bert = Impersonation("bert", ("ops",))
    cluster.connect(file=str(tmp_path / "elsewhere"), impersonation=bert).version()
    assert api.asked[0].headers["impersonate-user"] == "bert"
    assert api.asked[0].headers["impersonate-group"] == "ops"


def test_a_name_in_another_script_arrives_as_it_is_written(serve: Serve, connect: Connect) -> None:
    api = serve(lambda _: Reply())
    connect(api.url, user={"token": "secret", "as": "Jürgen Σ"}).version()
    assert api.asked[0].headers["impersonate-user"].encode("latin-1").decode() == "Jürgen Σ"


def test_nobody_acts_as_a_group_alone_or_as_a_name_with_a_line_break(connect: Connect) -> None:
    with pytest.raises(UsageError, match="together with a user"):
        connect("http://127.0.0.1:1", user={"as-groups": ["system:masters"]})
    with pytest.raises(UsageError, match="is no valid name of a user or group"):
        Impersonation("anna\r\nimpersonate-group: system:masters")


SOCKS = "socks5://127.0.0.1:1080"


@pytest.mark.parametrize(
    ("user", "cluster", "why"),
    [
        ({"token": "a", "a-field-of-tomorrow": 1}, {}, "user u has `a-field-of-tomorrow`"),
        ({}, {"a-field-of-tomorrow": 1}, "cluster c has `a-field-of-tomorrow`"),
        ({"auth-provider": {"name": "azure"}}, {}, "auth-provider `azure`"),
        ({}, {"proxy-url": SOCKS}, f"the proxy {SOCKS} of the kubeconfig"),
        ({}, {"server": "10.0.0.1:6443"}, "not an https:// address"),
        ({"token": 7}, {}, "`token` is not text"),
        ({"client-certificate-data": "%%%"}, {}, "the kubeconfig cannot be used"),
        ({"client-certificate": "not-there.pem"}, {}, "not-there.pem"),
        ({"exec": {"command": ""}}, {}, "exec needs `command`"),
        ({"tokenFile": "not-there"}, {}, "the token cannot be read"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    user: dict[str, Any], cluster: dict[str, Any], why: str, connect: Connect
) -> None:
    with pytest.raises(KdistError) as raised:
        connect("http://127.0.0.1:1", user=user or {"token": "secret"}, cluster=cluster)
    assert why in str(raised.value)
    assert raised.value.code == Code.UNREACHABLE


def test_a_token_in_a_file_is_read_each_time_and_comes_first(
    tmp_path: Path, serve: Serve, connect: Connect
) -> None:
    api = serve(lambda _: Reply())
    found = None
    for word in ("one", "two"):
        (tmp_path / "token").write_text(f"{word}\n")
        found = found or connect(api.url, user={"token": "secret", "tokenFile": "token"})
        found.version()
    assert [each.headers["authorization"] for each in api.asked] == ["Bearer one", "Bearer two"]


def test_a_user_with_a_password_says_both(serve: Serve, connect: Connect) -> None:
    api = serve(lambda _: Reply())
    connect(api.url, user={"username": "anna", "password": "x:y"}).version()
    sent = api.asked[0].headers["authorization"].removeprefix("Basic ")
    assert base64.b64decode(sent) == b"anna:x:y"


def test_requests_go_through_the_proxy_of_the_kubeconfig(serve: Serve, connect: Connect) -> None:
    proxy = serve(lambda _: Reply(document={"gitVersion": "by the proxy"}))
    by = {"proxy-url": proxy.url.replace("//", "//me:word@")}
    found = connect("http://cluster.example:6443", cluster=by)
    assert found.version() == {"gitVersion": "by the proxy"}
    sent = proxy.asked[0].headers["proxy-authorization"].removeprefix("Basic ")
    assert base64.b64decode(sent) == b"me:word"


def test_the_proxy_of_the_environment_is_not_for_this_machine_nor_for_no_proxy(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = serve(lambda _: Reply(document={"gitVersion": "by the proxy"}))
    api = serve(lambda _: Reply())
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    assert connect("http://cluster.example:6443").version() == {"gitVersion": "by the proxy"}
    assert connect(api.url).version() == {}
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8,.example")
    assert kubeconfig.load().proxy == ""
    assert _access(connect, "http://cluster.example:6443").proxy == ""
    assert _access(connect, "http://10.1.2.3:6443").proxy == ""
    assert _access(connect, "http://11.1.2.3:6443").proxy == proxy.url


def _access(connect: Connect, url: str) -> Access:
    connect(url)
    return kubeconfig.load()


def test_the_name_of_the_server_may_be_another_than_its_address(
    tmp_path: Path, serve: Serve, connect: Connect, program: Callable[[str], str]
) -> None:
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=a"]
    words += [
        "-addext",
        "subjectAltName=DNS:cluster.example",
        "-keyout",
        str(tmp_path / "key"),
        "-out",
        str(tmp_path / "crt"),
    ]
    subprocess.run([program("openssl"), *words], capture_output=True, check=True)
    both = tmp_path / "both.pem"
    both.write_bytes((tmp_path / "key").read_bytes() + (tmp_path / "crt").read_bytes())
    api = serve(lambda _: Reply(), certificate=both)
    trusted = {"certificate-authority": str(tmp_path / "crt")}
    with pytest.raises(KdistError, match="not the one that the kubeconfig expects"):
        connect(api.url, cluster=trusted).version()
    found = connect(api.url, cluster={**trusted, "tls-server-name": "cluster.example"})
    assert found.version() == {}
    api.answer = lambda _: refusal(403, "not you")
    with pytest.raises(KdistError, match="not you"):
        found.exec("pod", ["true"])


def test_a_certificate_that_cannot_be_used_is_found_before_the_server_is_connected() -> None:
    access = Access("test", "ml", "https://127.0.0.1:1", authority="no certificate")
    with pytest.raises(ssl.SSLError, match="does not contain a certificate"):
        access.websocket("/api/v1")


def test_an_answer_that_is_silent_ends_with_the_request_timeout(
    tmp_path: Path, serve: Serve
) -> None:
    import threading

    held = threading.Event()

    def answer(_: object) -> Reply:
        held.wait(20)
        return Reply()

    api = serve(answer)
    write_kubeconfig(tmp_path / "config", api.url)
    with pytest.raises(KdistError, match="timed out"):
        cluster.connect(
            file=str(tmp_path / "config"), retry_seconds=0.0, request_timeout=0.1
        ).version()
    held.set()


def test_a_context_that_does_not_exist_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(KdistError, match="it has no context `prod`; it has test") as raised:
        cluster.connect("prod")
    assert raised.value.code == Code.UNREACHABLE


def test_without_a_kubeconfig_the_way_to_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(KdistError, match="there is no kubeconfig at") as raised:
        cluster.connect()
    assert "KUBECONFIG" in raised.value.hint
    assert raised.value.next_command == "kubectl config get-contexts"


BROKEN = ["", "a: [", "just words", "apiVersion: v1\nkind: Config\n"]


@pytest.mark.parametrize("text", [*BROKEN, "current-context: x\ncontexts: 7\n"])
def test_a_broken_kubeconfig_is_an_error_and_no_traceback(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(KdistError, match="the kubeconfig cannot be used") as raised:
        cluster.connect()
    assert f"{file}; it stays so until" in raised.value.hint
    assert raised.value.next_command == "kubectl config get-contexts"


def test_several_files_are_one_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "one", "http://127.0.0.1:1")
    (tmp_path / "two").write_text(
        "contexts: [{name: other, context: {cluster: c, user: u, namespace: elsewhere}}]\n"
    )
    files = (str(tmp_path / name) for name in ("one", "two", "missing"))
    monkeypatch.setenv("KUBECONFIG", ":".join(files))
    assert cluster.connect("other").namespace == "elsewhere"
    assert cluster.connect().namespace == "ml"
    assert cluster.connect(namespace="mine").namespace == "mine"


def test_certificates_may_be_in_it_or_in_files_next_to_it(tmp_path: Path) -> None:
    pem = "-----BEGIN CERTIFICATE-----\n"
    (tmp_path / "a.pem").write_text(pem)
    file = tmp_path / "config"
    files = {"client-certificate": "a.pem", "client-key": str(tmp_path / "a.pem")}
    inside = {f"{name}-data": base64.b64encode(pem.encode()).decode() for name in files}
    for user in (files, inside):
        trusted = {"certificate-authority": "a.pem"}
        write_kubeconfig(file, "https://127.0.0.1:1", user=user, cluster=trusted)
        found = kubeconfig.load(file=str(file))
        credential = found.credentials.get()
        assert credential.certificate == pem
        assert credential.key == pem
        assert found.authority == pem
        assert credential.authorization == ""


ASK = """
import sys
import kdist.commands.get
from kdist import cluster
from kdist.job import cluster as jobs
cluster.connect().version()
print(sorted(set(sys.modules) & {"kubernetes", "requests", "oauthlib", "pydantic", "websocket", \
"subprocess", "urllib.request", "kdist.diagnose", "kdist.spec", "kdist.job.local"}))
"""


def test_a_request_imports_no_heavy_library(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api: Api = serve(lambda _: Reply())
    write_kubeconfig(tmp_path / "config", api.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert api.asked[0].headers["authorization"] == "Bearer secret"
