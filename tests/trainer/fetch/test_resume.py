"""A fetch that was interrupted goes on, and one that was done fetches only what has changed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.patience import soon
from tests.trainer.fetch.conftest import Bucket
from tests.trainer.fetch.program import Program, fetch, read_files, start
from tests.trainer.fetch.web_server import WebServer
from tests.trainer.object_store.s3_server import Request, always

pytestmark = pytest.mark.processes

DATA = random.Random(1).randbytes(4_000_000)


def partial_bytes(folder: Path) -> int:
    """The bytes of all files that are not whole yet."""
    return sum(path.stat().st_size for path in folder.glob("partial/*"))


def half_done(web: WebServer, folder: Path) -> Program:
    """A fetch that has half of the file, and waits for the other one."""
    web.files["/set.tar"] = DATA
    web.gate.clear()
    program = start(f"{web.url}/set.tar", folder)
    assert soon(lambda: partial_bytes(folder) == len(DATA) // 2, 20)
    return program


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.sampled
def test_a_killed_fetch_goes_on_with_the_byte_that_it_had_reached(
    web: WebServer, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "to"
    ended = half_done(web, folder).kill(number)
    assert ended.code == (200 if number == signal.SIGTERM else -signal.SIGKILL)
    assert partial_bytes(folder) == len(DATA) // 2
    assert read_files(folder) == {}
    if number == signal.SIGTERM:
        assert (ended.record["outcome"], ended.record["code"]) == ("stopped", 200)
        assert ended.events[-1]["event"] == "data-stopped"
    web.gate.set()
    web.requests.clear()
    ended = fetch(f"{web.url}/set.tar", folder)
    assert ended.files == {"set.tar": DATA}
    (asked,) = [one for one in web.requests if one.method == "GET"]
    assert asked.headers["range"] == f"bytes={len(DATA) // 2}-"
    assert not (folder / "partial").exists()


def test_a_partial_file_of_another_version_starts_over(web: WebServer, tmp_path: Path) -> None:
    half_done(web, tmp_path / "to").kill()
    other = random.Random(2).randbytes(len(DATA))
    web.files["/set.tar"] = other
    web.gate.set()
    web.requests.clear()
    assert fetch(f"{web.url}/set.tar", tmp_path / "to").files == {"set.tar": other}
    assert "range" not in web.requests[-1].headers


@pytest.mark.sampled
def test_a_file_whose_version_nothing_tells_is_fetched_again(
    web: WebServer, tmp_path: Path
) -> None:
    web.has_etag = web.has_modified = False
    half_done(web, tmp_path / "to").kill()
    web.gate.set()
    for _ in range(2):
        web.requests.clear()
        assert fetch(f"{web.url}/set.tar", tmp_path / "to").files == {"set.tar": DATA}
        assert {one.headers.get("range", "") for one in web.requests} == {""}


def test_files_that_are_whole_are_not_fetched_again_after_a_kill(
    bucket: Bucket, tmp_path: Path
) -> None:
    names = [f"{number:02}" for number in range(12)]
    for name in names:
        bucket.put(f"set/{name}", name.encode() * 1000)
    bucket.put("set/large", DATA)
    assert bucket.server is not None

    def hang(request: Request) -> str:
        return "hang" if request.key == "set/large" and request.method == "GET" else ""

    bucket.server.faults = hang
    program = bucket.start("set", tmp_path / "to")
    assert soon(lambda: len(read_files(tmp_path / "to")) == len(names), 20)
    program.kill()
    bucket.server.faults = lambda _request: ""
    bucket.server.requests.clear()
    ended = bucket.fetch("set", tmp_path / "to")
    assert ended.files["large"] == DATA
    assert len(ended.files) == 13
    assert {one.key for one in bucket.server.requests if one.key.startswith("set/")} == {
        "set/large"
    }
    assert ended.event("data-fetch")["cached_bytes"] == 12 * 2000


def test_only_what_has_changed_is_fetched_again_and_what_is_gone_is_removed(
    bucket: Bucket, tmp_path: Path
) -> None:
    for name in ("same", "changed", "gone/below"):
        bucket.put(f"set/{name}", name.encode())
    bucket.fetch("set", tmp_path / "to")
    assert bucket.server is not None
    del bucket.server.objects["set/gone/below"]
    bucket.put("set/changed", b"CHANGED", tag="second")
    bucket.put("set/new", b"new")
    bucket.server.requests.clear()
    ended = bucket.fetch("set", tmp_path / "to")
    assert ended.files == {"same": b"same", "changed": b"CHANGED", "new": b"new"}
    assert not (tmp_path / "to/files/gone").exists()
    assert bucket.got("set/same") == []
    assert len(bucket.got("set/changed")) == 1


def test_a_file_that_was_damaged_here_in_its_size_is_fetched_again(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("set/a", b"content")
    bucket.fetch("set", tmp_path / "to")
    (tmp_path / "to/files/a").write_bytes(b"cont")
    (tmp_path / "to/files/foreign").write_bytes(b"of nobody")
    assert bucket.fetch("set", tmp_path / "to").files == {"a": b"content"}


@pytest.mark.parametrize("state", [b"", b"[]", b"{", b'{"version": 1}', b"\xff"])
@pytest.mark.sampled
def test_a_damaged_record_of_the_folder_starts_over(
    bucket: Bucket, tmp_path: Path, state: bytes
) -> None:
    bucket.put("set/a", b"content")
    bucket.fetch("set", tmp_path / "to")
    (tmp_path / "to/files/a").write_bytes(b"garbled")
    (tmp_path / "to/fetch.json").write_bytes(state)
    assert bucket.fetch("set", tmp_path / "to").files == {"a": b"content"}


@pytest.mark.sampled
def test_a_file_may_become_a_folder_and_a_folder_a_file(bucket: Bucket, tmp_path: Path) -> None:
    assert bucket.server is not None
    for first, second in (("a", "a/b"), ("a/b", "a")):
        bucket.server.objects.clear()
        bucket.put(f"set/{first}", first.encode())
        assert bucket.fetch("set", tmp_path / "to").files == {first: first.encode()}
        bucket.server.objects.clear()
        bucket.put(f"set/{second}", second.encode(), tag="second")
        assert bucket.fetch("set", tmp_path / "to").files == {second: second.encode()}


def test_a_second_process_waits_for_the_first_and_fetches_nothing(
    web: WebServer, tmp_path: Path
) -> None:
    first = half_done(web, tmp_path / "to")
    second = start(f"{web.url}/set.tar", tmp_path / "to")
    assert second.process.stdout is not None
    line = second.process.stdout.readline()
    assert '"event":"data-waiting"' in line
    assert "another process fetches into" in line
    web.gate.set()
    assert first.wait().code == 0
    ended = second.wait()
    assert ended.code == 0
    assert ended.event("data-fetch")["cached_bytes"] == len(DATA)
    assert web.sent == {"/set.tar": len(DATA)}


@pytest.mark.sampled
def test_a_process_that_waits_can_be_stopped(web: WebServer, tmp_path: Path) -> None:
    first = half_done(web, tmp_path / "to")
    second = start(f"{web.url}/set.tar", tmp_path / "to")
    assert second.process.stdout is not None
    second.process.stdout.readline()
    assert second.kill(signal.SIGTERM).code == 200
    assert first.process.poll() is None
    first.kill()


@pytest.mark.parametrize("place", ["bucket", "hub", "web"])
@pytest.mark.sampled
def test_a_process_that_lists_can_be_stopped(
    web: WebServer, bucket: Bucket, tmp_path: Path, place: str
) -> None:
    if place == "bucket":
        assert bucket.server is not None
        bucket.server.faults = always("hang")
        program = bucket.start("set", tmp_path / "to")
        assert soon(lambda: bucket.server is not None and bucket.server.requests, 20)
    else:
        web.faults = lambda _asked: "hang"
        url = "hf://team/model" if place == "hub" else f"{web.url}/a"
        program = start(url, tmp_path / "to", HF_ENDPOINT=web.url)
        assert soon(lambda: web.requests, 20)
    ended = program.kill(signal.SIGTERM)
    assert (ended.code, ended.record["outcome"]) == (200, "stopped")
    assert ended.stderr == ""


@pytest.mark.sampled
def test_progress_is_told_at_most_every_two_seconds(web: WebServer, tmp_path: Path) -> None:
    program = half_done(web, tmp_path / "to")
    assert program.process.stdout is not None
    os.set_blocking(program.process.stdout.fileno(), True)
    lines = [program.process.stdout.readline() for _ in range(3)]
    web.gate.set()
    assert program.wait().code == 0
    assert '"event":"data-fetch"' in lines[0]
    for line in lines[1:]:
        assert '"event":"data-progress"' in line
        assert f'"done_bytes":{len(DATA) // 2},"total_bytes":{len(DATA)}' in line
        assert '"files_done":0,"files":1,"bytes_per_second":' in line
    stamps = [line[9 + 17 : 9 + 23] for line in lines[1:]]
    assert (float(stamps[1]) - float(stamps[0])) % 60 >= 1.9
