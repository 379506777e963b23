"""A file over HTTP, whatever its server can and however it fails."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from kdist_trainer.errors import DataError
from kdist_trainer.fetch import ChangedError, TransientError
from kdist_trainer.fetch.web import StatusError, WebClient
from tests.trainer.fetch.program import fetch, start
from tests.trainer.fetch.web_server import FAULTS, Asked, Reply, WebServer, in_turn

pytestmark = pytest.mark.processes

DATA = random.Random(1).randbytes(3_000_000)
TOKEN = "Bearer a-token-that-nobody-shows"  # noqa: S105 - of this server alone


@pytest.fixture(autouse=True)
def _one_file(web: WebServer) -> None:
    web.files["/sets/set.tar"] = DATA


def url(web: WebServer) -> str:
    return f"{web.url}/sets/set.tar"


def test_a_file_has_the_last_part_of_its_path_as_its_name(web: WebServer, tmp_path: Path) -> None:
    ended = fetch(url(web), tmp_path / "to")
    assert ended.code == 0, ended.stdout
    assert ended.files == {"set.tar": DATA}
    assert web.sent == {"/sets/set.tar": len(DATA)}


@pytest.mark.parametrize(
    ("lacks", "fault"),
    [
        pytest.param(lacks, fault, marks=marks)
        for lacks, marks in (
            ("etag", ()),
            ("ranges", ()),
            ("modified", pytest.mark.chaos),
            ("length", pytest.mark.chaos),
        )
        for fault in FAULTS
        # without a length nothing tells where a body ends: that is what sha256 is for
        if fault != "no-head" and (lacks, fault) != ("length", "truncated")
    ],
)
@pytest.mark.sampled
def test_a_server_may_lack_what_it_likes_and_fail_twice(
    web: WebServer, tmp_path: Path, lacks: str, fault: str
) -> None:
    setattr(web, f"has_{lacks}", False)
    web.faults = in_turn(fault, fault)
    ended = fetch(url(web), tmp_path / "to")
    assert ended.code == 0, ended.stdout
    assert ended.files == {"set.tar": DATA}


def test_a_body_that_was_cut_is_continued_where_it_ended(web: WebServer, tmp_path: Path) -> None:
    web.faults = in_turn("truncated", "truncated")
    assert fetch(url(web), tmp_path / "to").files == {"set.tar": DATA}
    assert web.sent["/sets/set.tar"] == len(DATA)
    asked = [one.headers for one in web.requests if one.method == "GET"]
    assert [one.get("range") for one in asked] == [None, "bytes=1500000-", "bytes=2250000-"]
    assert all(one["if-range"].startswith('"') for one in asked[1:])


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_body_in_chunks_is_whole_only_with_its_last_one(
    web: WebServer, tmp_path: Path, has_ranges: bool
) -> None:
    web.is_chunked, web.has_ranges = True, has_ranges
    web.faults = in_turn("truncated", "slow")
    ended = fetch(url(web), tmp_path / "to")
    assert ended.files == {"set.tar": DATA}, ended.stdout
    assert ended.event("data-retry")["file"] == "set.tar"


def test_a_server_that_always_ends_at_the_same_byte_makes_no_progress(
    web: WebServer, tmp_path: Path
) -> None:
    web.has_ranges = False
    web.faults = in_turn(*["truncated"] * 1000)
    ended = fetch(url(web), tmp_path / "to", "--stall-seconds", "3")
    assert (ended.code, ended.record["cause"]) == (203, "storage")
    assert "1500000 bytes are missing" in ended.record["message"]


def test_a_body_that_stands_still_is_asked_for_again_from_there(
    web: WebServer, tmp_path: Path
) -> None:
    web.gate.clear()
    program = start(url(web), tmp_path / "to", "--stall-seconds", "2")
    assert program.process.stdout is not None
    lines = iter(program.process.stdout.readline, "")
    retry = next(line for line in lines if '"event":"data-retry"' in line)
    assert '"reason":"no reply in time"' in retry
    web.gate.set()
    ended = program.wait()
    assert ended.code == 0, ended.stdout
    assert ended.files == {"set.tar": DATA}
    assert {one.headers.get("range") for one in web.requests} >= {None, "bytes=1500000-"}


def test_nobody_at_the_address_is_an_error_to_retry(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/file"
        ended = fetch(address, tmp_path / "to", "--stall-seconds", "2")
    assert ended.code == 203
    assert "Connection refused" in ended.record["message"]


def test_a_server_that_refuses_head_is_asked_by_get(web: WebServer, tmp_path: Path) -> None:
    web.faults = in_turn("no-head", method="HEAD")
    assert fetch(url(web), tmp_path / "to").files == {"set.tar": DATA}


def test_a_file_that_changes_meanwhile_starts_over(web: WebServer, tmp_path: Path) -> None:
    other = random.Random(2).randbytes(2_000_000)
    cut = in_turn("truncated")

    def change(asked: Asked) -> str:
        if asked.headers.get("range"):
            web.files["/sets/set.tar"] = other
        return cut(asked)

    web.faults = change
    ended = fetch(url(web), tmp_path / "to")
    assert ended.code == 0, ended.stdout
    assert ended.files == {"set.tar": other}
    assert "it has changed while it was fetched" in ended.event("data-retry")["reason"]


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("/sets/none", 65, "is not there (status 404 Not Found): correct the URL"),
        ("/sets/", 64, "where PATH ends with the name of a file"),
        ("/sets/a?signature=hunter2", 64, "must not contain a query or a fragment"),
    ],
)
@pytest.mark.sampled
def test_a_url_that_names_no_file_is_an_error_that_says_so(
    web: WebServer, tmp_path: Path, path: str, code: int, words: str
) -> None:
    ended = fetch(web.url + path, tmp_path / "to")
    assert ended.code == code
    assert words in ended.record["message"]
    assert ended.stderr == ""


@pytest.mark.parametrize("where", ["me:hunter2@", "?token=hunter2", "#hunter2"])
def test_a_credential_in_the_url_is_refused_and_not_repeated(tmp_path: Path, where: str) -> None:
    url = f"https://{where}host/a" if "@" in where else f"https://host/a{where}"
    ended = fetch(url, tmp_path / "to")
    assert (ended.code, ended.record["cause"]) == (64, "config")
    assert "must not contain" in ended.record["message"]
    assert "hunter2" not in ended.shown


def test_a_credential_is_sent_and_shown_nowhere(web: WebServer, tmp_path: Path) -> None:
    web.authorization = TOKEN
    web.faults = in_turn("truncated", "503")
    # a Secret made from a file ends with a newline
    ended = fetch(url(web), tmp_path / "to", HTTP_AUTHORIZATION=f"{TOKEN}\n")
    assert ended.files == {"set.tar": DATA}
    assert "a-token-that-nobody-shows" not in ended.shown


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ("", 64, "there is no credential: put the value of the Authorization header into the key"),
        ("Bearer of-somebody-else", 65, "is denied (status 403 Forbidden): check the value of"),
        ("Bearer two\nlines", 64, "characters that no header can have"),
    ],
)
@pytest.mark.sampled
def test_a_missing_or_refused_credential_is_an_error_that_names_the_key(
    web: WebServer, tmp_path: Path, value: str, code: int, words: str
) -> None:
    web.authorization = TOKEN
    ended = fetch(url(web), tmp_path / "to", HTTP_AUTHORIZATION=value)
    assert ended.code == code
    assert words in ended.record["message"]
    assert "HTTP_AUTHORIZATION" in ended.record["message"]
    assert not value or value not in ended.shown


@pytest.mark.parametrize("status", [403, 418, 503])
@pytest.mark.sampled
def test_a_credential_that_a_server_repeats_is_not_shown(
    web: WebServer, tmp_path: Path, status: int
) -> None:
    web.routes = lambda asked: Reply(status, reason=f"not {asked.headers['authorization']}")
    ended = fetch(url(web), tmp_path / "to", "--stall-seconds", "1", HTTP_AUTHORIZATION=TOKEN)
    assert ended.code == (203 if status == 503 else 65)
    assert f"status {status} not ***" in ended.record["message"]
    assert "a-token-that-nobody-shows" not in ended.shown


@pytest.mark.parametrize(
    ("kind", "statuses"),
    [
        pytest.param(TransientError, (408, 425, 429, 500, 502, 503, 504, 507, 599), id="again"),
        pytest.param(StatusError, (400, 401, 403, 404, 405, 410, 416, 451, 501, 505), id="final"),
        pytest.param(ChangedError, (409, 412), id="changed"),
        pytest.param(DataError, (300, 304, 305), id="nowhere"),
    ],
)
def test_a_status_tells_whether_a_later_request_may_succeed(
    web: WebServer, kind: type[Exception], statuses: tuple[int, ...]
) -> None:
    client, replies = WebClient(), map(Reply, statuses)
    web.routes = lambda _: next(replies)
    for _ in statuses:
        with pytest.raises(kind):
            client.open(url(web))


def test_another_server_gets_no_credential_by_a_redirect(web: WebServer, tmp_path: Path) -> None:
    with WebServer({"/elsewhere": DATA}) as other:
        web.redirects = {"/sets/set.tar": f"{other.url}/elsewhere"}
        web.authorization = TOKEN
        ended = fetch(url(web), tmp_path / "to", HTTP_AUTHORIZATION=TOKEN)
        assert ended.files == {"set.tar": DATA}
        assert other.requests
        assert not [one for one in other.requests if "authorization" in one.headers]


def test_a_redirect_on_the_same_server_keeps_the_credential(web: WebServer, tmp_path: Path) -> None:
    web.authorization = TOKEN
    web.redirects = {"/latest.tar": "/sets/set.tar"}
    ended = fetch(f"{web.url}/latest.tar", tmp_path / "to", HTTP_AUTHORIZATION=TOKEN)
    assert ended.files == {"latest.tar": DATA}


@pytest.mark.sampled
def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    server = WebServer({"/a": b"a"})
    authority = str(server.encrypt(tmp_path))
    with server:
        refused = fetch(f"{server.url}/a", tmp_path / "refused")
        assert (refused.code, refused.record["cause"]) == (65, "data")
        assert "certificate is not valid" in refused.record["message"]
        assert "SSL_CERT_FILE" in refused.record["message"]
        known = fetch(f"{server.url}/a", tmp_path / "known", SSL_CERT_FILE=authority)
        assert known.files == {"a": b"a"}, known.stdout


def test_a_redirect_from_https_to_http_is_refused(web: WebServer, tmp_path: Path) -> None:
    server = WebServer()
    authority = str(server.encrypt(tmp_path))
    server.redirects = {"/a": url(web)}
    with server:
        ended = fetch(f"{server.url}/a", tmp_path / "to", SSL_CERT_FILE=authority)
    assert ended.code == 65
    assert "redirects from https to http" in ended.record["message"]
    assert web.requests == []


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/a", "/loop"])
@pytest.mark.sampled
def test_a_redirect_to_no_web_server_is_refused(
    web: WebServer, tmp_path: Path, target: str
) -> None:
    web.redirects = {"/loop": target}
    ended = fetch(f"{web.url}/loop", tmp_path / "to")
    assert ended.code == 65, ended.stdout
    assert ended.files == {}
