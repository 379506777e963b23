"""An API server that is away, busy or half there: tried again, told of once, and in the end said
plainly.
"""

from __future__ import annotations

import math
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kdist.cluster import transport
from kdist.cluster.transport import Attempts, RetryPolicy
from kdist.errors import Code, KdistError
from tests.cli.cluster.api import Api, Asked, Reply, refusal
from tests.cli.cluster.conftest import Connect, Serve

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}


def in_turn(*replies: Reply) -> Callable[[Asked], Reply]:
    """Answers with each reply once, and with the last one from then on."""
    left = list(replies)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_that_is_busy_or_broken_is_asked_again_and_reported_once(
    status: int, serve: Serve, connect: Connect, reported: list[str]
) -> None:
    api = serve(in_turn(refusal(status, "later"), refusal(status, "later"), Reply(document=POD)))
    assert connect(api.url).get("v1", "Pod", "a") == POD
    assert len(api.asked) == 3
    assert reported[1:] == ["the API server answers again"]
    assert reported[0].endswith("trying again for 5 s")


def test_the_pause_that_the_server_asks_for_is_kept(
    serve: Serve, connect: Connect, reported: list[str]
) -> None:
    api = serve(in_turn(Reply(429, headers={"Retry-After": "9"}), Reply(document=POD)))
    with pytest.raises(KdistError, match="get pods/a") as raised:
        connect(api.url, retry_seconds=2).get("v1", "Pod", "a")
    assert raised.value.code == Code.UNREACHABLE
    assert len(api.asked) == 1, "nine seconds are more than the patience, so there is no second try"
    assert reported == []


def test_a_server_that_comes_back_answers_all_threads_and_the_outage_is_reported_once(
    serve: Serve, connect: Connect, reported: list[str]
) -> None:
    first = serve(in_turn(Reply(document=POD)))
    cluster = connect(first.url, retry_seconds=20)
    first.close()
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(cluster.get("v1", "Pod", "a")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    while not reported:
        threads[0].join(0.005)
    again = Api(in_turn(Reply(document=POD)), port=first.port)
    try:
        for thread in threads:
            thread.join()
    finally:
        again.close()
    assert found == [POD] * 6
    assert [text for text in reported if "does not answer" in text] == reported[:1]
    assert reported[-1] == "the API server answers again"


def test_a_server_that_begins_again_is_asked_again_until_it_knows_its_roles(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = "/api/v1/namespaces/ml/secrets/a"

    def answer(asked: Asked) -> Reply:
        return refusal(403, "no", "Forbidden") if asked.path == hidden else Reply(document=POD)

    first = serve(answer)
    cluster = connect(first.url, retry_seconds=0.3)
    assert cluster.get("v1", "Pod", "a") == POD
    with pytest.raises(KdistError):
        cluster.get("v1", "Secret", "a")
    first.close()
    with pytest.raises(KdistError, match="does not answer"):
        cluster.get("v1", "Pod", "a")
    forbidden = refusal(403, "no", "Forbidden")
    again = serve(in_turn(forbidden, forbidden, Reply(document=POD)), port=first.port)
    assert cluster.get("v1", "Pod", "a") == POD
    again.answer = lambda _: forbidden
    with pytest.raises(KdistError):
        cluster.get("v1", "Secret", "a")  # which was not allowed before either
    assert [each.path for each in again.asked].count(hidden) == 1
    monkeypatch.setattr(transport, "WARM_UP_SECONDS", 0.0)
    with pytest.raises(KdistError):
        cluster.get("v1", "Pod", "a")


def test_a_server_that_stays_away_is_an_error_with_the_code_for_it(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        KdistError, match=f"127.0.0.1:{port} does not answer: connection refused"
    ) as raised:
        connect(f"http://127.0.0.1:{port}", retry_seconds=0.1).get("v1", "Pod", "a")
    assert raised.value.code == Code.UNREACHABLE
    assert "context test" in raised.value.hint


def test_a_name_that_nobody_knows_is_said_plainly(connect: Connect) -> None:
    with pytest.raises(KdistError, match=r"nowhere\.invalid:6443 does not answer") as raised:
        connect("http://nowhere.invalid:6443", retry_seconds=0.05).version()
    assert "HTTPConnection" not in str(raised.value)


def test_a_webhook_that_is_away_is_waited_for_and_named(
    serve: Serve, connect: Connect, reported: list[str]
) -> None:
    away = refusal(
        500,
        'Internal error occurred: failed calling webhook "mjob.kb.io": connection refused',
        "InternalError",
    )
    api = serve(in_turn(away, Reply(document=POD)))
    assert connect(api.url).send_create(POD) == POD
    assert "webhook" in reported[0]
    assert "mjob.kb.io" in reported[0]


def test_a_pod_that_does_not_answer_is_no_outage(
    serve: Serve, connect: Connect, reported: list[str]
) -> None:
    api = serve(
        in_turn(
            refusal(503, "error trying to reach service: connection refused", "ServiceUnavailable")
        )
    )
    with pytest.raises(KdistError, match="connection refused"):
        connect(api.url).proxy("a", 9401, "/status")
    assert [each.path for each in api.asked] == ["/api/v1/namespaces/ml/pods/a:9401/proxy/status"]
    assert reported == []


def test_an_answer_from_something_else_than_an_api_server_is_called_so(
    serve: Serve, connect: Connect
) -> None:
    api = serve(lambda _: Reply(document="<html>log in</html>"))
    with pytest.raises(KdistError, match="not like an API server"):
        connect(api.url).version()


@pytest.fixture
def closing() -> Iterator[int]:
    """Port of a balancer that has nobody behind it: it takes connections and closes them in the
    handshake.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)

        def run() -> None:
            try:
                while True:
                    connection, _ = server.accept()
                    connection.recv(1)
                    connection.close()
            except OSError:
                return

        threading.Thread(target=run, daemon=True).start()
        yield server.getsockname()[1]


def test_an_end_of_file_in_the_handshake_is_an_outage(
    closing: int, connect: Connect, reported: list[str]
) -> None:
    with pytest.raises(KdistError, match="does not answer") as raised:
        connect(f"https://127.0.0.1:{closing}", retry_seconds=1).version()
    assert raised.value.code == Code.UNREACHABLE
    assert "certificate" not in str(raised.value)
    assert len(reported) == 1


def test_a_wrong_certificate_is_no_outage(
    tmp_path: Path,
    serve: Serve,
    connect: Connect,
    reported: list[str],
    program: Callable[[str], str],
) -> None:
    file = tmp_path / "server.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=127.0.0.1"]
    made = subprocess.run(
        [program("openssl"), *words, "-keyout", "-", "-out", "-"], capture_output=True, check=True
    )
    file.write_bytes(made.stdout)
    api = serve(in_turn(Reply(document=POD)), certificate=file)
    with pytest.raises(
        KdistError, match=r"certificate of .* is not the one that the kubeconfig expects"
    ) as raised:
        connect(api.url).version()
    assert raised.value.code == Code.UNREACHABLE
    assert reported == []
    trusting = connect(api.url, cluster={"insecure-skip-tls-verify": True})
    assert trusting.get("v1", "Pod", "a") == POD


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            "failed to create manager for existing fields: failed to convert new object "
            "(ml/digits; batch/v1, Kind=Job) to smd "
            'typed: .spec.template.spec.containers[name="trainer"].volumeMounts: '
            'duplicate entries for key [mountPath="/data"]',
            'spec.template.spec.containers[name="trainer"].volumeMounts has two entries with '
            'mountPath "/data"',
        ),
        (
            (
                "failed to create typed patch object (ml/digits; batch/v1, Kind=Job): "
                ".spec.x: field not declared in schema"
            ),
            ".spec.x",
        ),
    ],
)
def test_an_answer_of_500_about_the_object_itself_is_believed_at_once(
    message: str, says: str, serve: Serve, connect: Connect, reported: list[str]
) -> None:
    api = serve(in_turn(refusal(500, message, "InternalError"), Reply(document=POD)))
    with pytest.raises(KdistError) as raised:
        connect(api.url).get("v1", "Pod", "a")
    assert says in raised.value.message
    assert raised.value.code == Code.ERROR, "the server was reached"
    assert (len(api.asked), reported) == (1, [])


def test_an_answer_of_500_that_names_nothing_that_is_away_is_tried_again_briefly(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "UNEXPLAINED_SECONDS", 0.05)
    odd = serve(lambda _: refusal(500, "Internal error occurred: odd", "InternalError"))
    with pytest.raises(KdistError, match="odd"):  # and not after ten minutes
        connect(odd.url, retry_seconds=600).get("v1", "Pod", "a")
    away = serve(in_turn(*[refusal(500, "etcdserver: request timed out")] * 5, Reply(document=POD)))
    assert connect(away.url, retry_seconds=60).get("v1", "Pod", "a") == POD


def test_a_request_that_began_before_the_first_answer_is_as_patient_as_later_ones(
    reported: list[str],
) -> None:
    policy = RetryPolicy(0.0, reported.append, until=math.inf)
    early = Attempts(policy)
    assert not early.pause("the server does not answer"), "nobody knows whether there is a server"
    policy.succeeded()  # to another thread
    assert early.pause("the server does not answer")
