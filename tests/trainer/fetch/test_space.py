"""What does not fit is refused before it is fetched, with the field to raise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer.fetch.fetcher import format_bytes
from tests.small_disk import small_disk
from tests.trainer.fetch.conftest import Bucket
from tests.trainer.fetch.program import fetch, start
from tests.trainer.fetch.web_server import WebServer

pytestmark = pytest.mark.processes

MIB = 1 << 20


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=4)


@pytest.mark.sampled
def test_more_than_the_job_allows_is_refused_before_it_is_fetched(
    bucket: Bucket, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        bucket.put(f"set/{name}", bytes(3 * MIB))
    ended = bucket.fetch("set", tmp_path / "to", "--max-bytes", str(5 * MIB))
    assert (ended.code, ended.record["cause"]) == (65, "data")
    assert (
        "has 6291456 bytes (6.0 MiB), more than the 5242880 bytes (5.0 MiB) of spec.data[0].size: "
        "raise spec.data[0].size"
    ) in ended.record["message"]
    assert bucket.got("set/a") == []
    assert bucket.fetch("set", tmp_path / "to", "--max-bytes", str(6 * MIB)).code == 0


@pytest.mark.sampled
def test_a_file_of_unknown_size_ends_where_the_job_allows_no_more(
    web: WebServer, tmp_path: Path
) -> None:
    web.files["/a"], web.has_length = bytes(3 * MIB), False
    ended = fetch(f"{web.url}/a", tmp_path / "to", "--max-bytes", str(MIB))
    assert ended.code == 65
    assert "has at least" in ended.record["message"]
    assert "raise spec.data[0].size" in ended.record["message"]
    assert fetch(f"{web.url}/a", tmp_path / "to", "--max-bytes", str(3 * MIB)).code == 0


def test_more_than_the_disk_has_is_refused_before_it_is_fetched(
    bucket: Bucket, tmp_path: Path, disk: Path
) -> None:
    bucket.put("set/a", bytes(5 * MIB))
    ended = bucket.fetch("set", disk / "to", field="spec.train.init")
    assert (ended.code, ended.record["cause"]) == (65, "data")
    assert "5242880 bytes (5.0 MiB) of s3://bucket/set" in ended.record["message"]
    assert "free: make room there, or raise spec.train.init.size" in ended.record["message"]
    assert bucket.got("set/a") == []


def test_a_disk_that_becomes_full_meanwhile_is_named_with_the_field(
    web: WebServer, tmp_path: Path, disk: Path
) -> None:
    web.files["/a"], web.has_length = bytes(5 * MIB), False
    ended = fetch(f"{web.url}/a", disk / "to")
    assert (ended.code, ended.record["cause"]) == (65, "data")
    assert "no space is left for the rest of a" in ended.record["message"]
    assert "spec.data[0].size" in ended.record["message"]


@pytest.mark.sampled
def test_what_is_there_already_needs_no_room(web: WebServer, disk: Path) -> None:
    web.files["/a"] = bytes(3 * MIB)
    url = f"{web.url}/a"
    assert fetch(url, disk / "to").code == 0
    assert fetch(url, disk / "to").code == 0
    web.gate.clear()
    web.files["/a"] = bytes(3 * MIB)[::-1] + b"1"
    program = start(url, disk / "to")
    while not list((disk / "to/partial").glob("*")):
        assert program.process.poll() is None
    program.kill()
    web.gate.set()
    assert fetch(url, disk / "to").files == {"a": web.files["/a"]}


def test_numbers_of_bytes_are_exact_and_rounded() -> None:
    assert format_bytes(10) == "10 bytes"
    assert format_bytes(10 << 30) == "10737418240 bytes (10.0 GiB)"
