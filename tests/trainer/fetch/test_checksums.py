"""Digests: of a single file, and of many by SHA256SUMS."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from kdist_trainer.errors import DataError
from kdist_trainer.fetch.fetcher import parse_sums
from tests.trainer.fetch.conftest import Bucket
from tests.trainer.fetch.program import fetch
from tests.trainer.fetch.web_server import WebServer, in_turn

pytestmark = pytest.mark.processes

DATA = b"some content" * 10_000
WRONG = "0" * 64


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sums(**files: bytes) -> bytes:
    return "".join(f"{digest(data)}  {name}\n" for name, data in files.items()).encode()


def test_a_file_with_the_digest_is_taken(web: WebServer, tmp_path: Path) -> None:
    web.files["/a"] = DATA
    web.faults = in_turn("truncated")
    for _ in range(2):
        ended = fetch(f"{web.url}/a", tmp_path / "to", "--sha256", digest(DATA).upper())
        assert ended.code == 0, ended.stdout
        assert ended.files == {"a": DATA}
    assert web.sent == {"/a": len(DATA)}


def test_a_file_with_another_digest_is_fetched_once_more_and_refused(
    web: WebServer, tmp_path: Path
) -> None:
    web.files["/a"] = DATA
    ended = fetch(f"{web.url}/a", tmp_path / "to", "--sha256", WRONG)
    assert (ended.code, ended.record["cause"]) == (65, "data")
    assert f"the SHA-256 of a is {digest(DATA)} instead of {WRONG}" in ended.record["message"]
    assert web.paths() == ["/a", "/a"]
    assert ended.files == {}


def test_a_file_that_was_damaged_on_its_way_comes_right_the_second_time(
    web: WebServer, tmp_path: Path
) -> None:
    web.files["/a"] = DATA
    web.has_length = False
    web.faults = in_turn("truncated")
    ended = fetch(f"{web.url}/a", tmp_path / "to", "--sha256", digest(DATA))
    assert ended.files == {"a": DATA}


def test_a_digest_is_compared_with_what_an_earlier_fetch_left(
    web: WebServer, tmp_path: Path
) -> None:
    web.files["/a"] = DATA
    fetch(f"{web.url}/a", tmp_path / "to")
    (tmp_path / "to/files/a").write_bytes(bytes(len(DATA)))
    ended = fetch(f"{web.url}/a", tmp_path / "to", "--sha256", digest(DATA))
    assert ended.files == {"a": DATA}


def test_sha256sums_is_compared_with_every_file_that_it_names(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("set/a", DATA)
    bucket.put("set/sub/b", b"b")
    bucket.put("set/unnamed", b"c")
    text = sums(a=DATA) + f"{digest(b'b')} *./sub/b\n".encode()
    bucket.put("set/SHA256SUMS", text)
    ended = bucket.fetch("set", tmp_path / "to", "--sha256", digest(text))
    assert ended.code == 0, ended.stdout
    assert len(ended.files) == 4
    bucket.put("set/sub/b", b"B", tag="second")
    ended = bucket.fetch("set", tmp_path / "to")
    assert ended.code == 65
    assert f"the SHA-256 of sub/b is {digest(b'B')} instead of" in ended.record["message"]
    assert len(bucket.got("set/sub/b")) == 3


def test_sha256sums_in_a_folder_is_that_of_the_folder(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("set/a", b"a")
    bucket.put("set/sub/a", b"A")
    bucket.put("set/sub/SHA256SUMS", sums(a=b"A"))
    assert bucket.fetch("set", tmp_path / "to").code == 0
    bucket.put("set/sub/SHA256SUMS", sums(a=b"a"), tag="second")
    ended = bucket.fetch("set", tmp_path / "to")
    assert ended.code == 65
    assert "the SHA-256 of sub/a is" in ended.record["message"]


def test_a_pinned_sha256sums_is_compared_first(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("set/a", DATA)
    bucket.put("set/SHA256SUMS", sums(a=DATA))
    ended = bucket.fetch("set", tmp_path / "to", "--sha256", WRONG)
    assert ended.code == 65
    assert "the SHA-256 of SHA256SUMS is" in ended.record["message"]
    assert bucket.got("set/a") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "have no SHA256SUMS among them"),
        (sums(missing=b""), "names 'missing', which is not there"),
        (sums(**{"../outside": b""}), "names '../outside', which is not there"),
        (sums(**{"/etc/passwd": b""}), "names '/etc/passwd', which is not there"),
        (b"\n\nno digest\n", "line 3 is not a digest, two spaces and a name"),
    ],
)
@pytest.mark.sampled
def test_sha256sums_that_cannot_be_right_is_an_error_that_says_why(
    bucket: Bucket, tmp_path: Path, text: bytes | None, words: str
) -> None:
    bucket.put("set/a", DATA)
    bucket.put("set/b", DATA)
    if text is not None:
        bucket.put("set/SHA256SUMS", text)
    options = ("--sha256", WRONG if text is None else digest(text))
    ended = bucket.fetch("set", tmp_path / "to", *options)
    assert ended.code == 65, ended.stdout
    assert words in ended.record["message"]


def test_the_format_is_that_of_sha256sum(tmp_path: Path) -> None:
    names = ["plain", "with  two spaces", "back\\slash", "new\nline", "ü", "*star"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    for option in ("--text", "--binary"):
        made = subprocess.run(
            ["sha256sum", option, "--", *names], cwd=tmp_path, capture_output=True, check=True
        )
        expected = {name: digest(name.encode()) for name in names}
        assert parse_sums(made.stdout, "SHA256SUMS") == expected
    with pytest.raises(DataError, match="line 1"):
        parse_sums(b"SHA256 (plain) = 0\n", "SHA256SUMS")
