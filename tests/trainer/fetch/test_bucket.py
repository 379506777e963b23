"""Data from object stores: an object, or all objects below a prefix."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import pytest

from tests.trainer.fetch.conftest import Bucket
from tests.trainer.object_store.s3_server import ACCESS_KEY, SECRET, always, in_turn

pytestmark = pytest.mark.processes

DATA = random.Random(1).randbytes(20_000_000)  # several ranges
NAMES = ("a", "deep/er/b", "with space", "ü.wav", "p%20c", "hash#1", "star*[x]", "empty")


def test_an_object_is_one_file_with_its_name(any_bucket: Bucket, tmp_path: Path) -> None:
    folder = secrets.token_hex(4)
    any_bucket.put(f"{folder}/set.tar", DATA)
    any_bucket.put(f"{folder}/set.tar.sig", b"another")
    ended = any_bucket.fetch(f"{folder}/set.tar", tmp_path / "to")
    assert ended.code == 0, ended.stdout
    assert ended.files == {"set.tar": DATA}
    begun, ready = ended.event("data-fetch"), ended.event("data-ready")
    assert (begun["files"], begun["bytes"], begun["cached_bytes"]) == (1, len(DATA), 0)
    assert (ready["files"], ready["bytes"]) == (1, len(DATA))
    assert ready["folder"] == str(tmp_path / "to/files")
    assert ready["seconds"] >= 0


def test_a_prefix_is_a_folder_of_all_objects_below_it(any_bucket: Bucket, tmp_path: Path) -> None:
    folder = secrets.token_hex(4)
    expected = {name: name.encode() if name != "empty" else b"" for name in NAMES}
    for name, data in expected.items():
        any_bucket.put(f"{folder}/set/{name}", data)
    any_bucket.put(f"{folder}/set-of-another", b"x")
    ended = any_bucket.fetch(f"{folder}/set/", tmp_path / "to")
    assert ended.code == 0, ended.stdout
    assert ended.files == expected


def test_markers_of_folders_are_no_files(bucket: Bucket, tmp_path: Path) -> None:
    for name, data in {"set/": b"", "set/sub/": b"", "set/sub/a": b"a"}.items():
        bucket.put(name, data)
    assert bucket.fetch("set", tmp_path / "to").files == {"sub/a": b"a"}


def test_a_large_object_is_read_by_ranges_on_the_condition_that_it_is_the_same(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("set.tar", DATA, tag="v1")
    assert bucket.fetch("set.tar", tmp_path / "to").files == {"set.tar": DATA}
    assert len(bucket.got("set.tar")) == 5
    assert bucket.server is not None
    conditions = {
        one.headers.get("if-match") for one in bucket.server.requests if one.method == "GET"
    }
    assert conditions == {'"v1"'}


@pytest.mark.parametrize("fault", ["503", "429", "close", "truncated", "slow"])
@pytest.mark.sampled
def test_a_request_that_fails_is_repeated(bucket: Bucket, tmp_path: Path, fault: str) -> None:
    bucket.put("set/a", DATA)
    bucket.put("set/b", b"b")
    assert bucket.server is not None
    bucket.server.faults = in_turn(fault, fault, method="GET")
    assert bucket.fetch("set", tmp_path / "to").files == {"a": DATA, "b": b"b"}


@pytest.mark.sampled
def test_a_store_that_fails_for_long_is_an_error_to_retry(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("set.tar", DATA)
    assert bucket.server is not None
    bucket.server.faults = always("503", method="GET")
    ended = bucket.fetch("set.tar", tmp_path / "to", "--stall-seconds", "3")
    assert ended.code == 203
    assert ended.record["cause"] == "storage"
    assert "status 503" in ended.event("data-retry")["reason"]
    assert "what has come is kept" in ended.record["message"]


def test_nothing_at_the_url_is_an_error_of_the_data(any_bucket: Bucket, tmp_path: Path) -> None:
    ended = any_bucket.fetch(f"none-{secrets.token_hex(4)}", tmp_path / "to")
    assert (ended.code, ended.record["cause"]) == (65, "data")
    assert "there is neither an object s3://bucket/none-" in ended.record["message"]
    assert ended.event("data-failed")["reason"] == ended.record["message"]


def test_a_refused_key_is_an_error_that_names_the_secret(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("set.tar", DATA)
    ended = bucket.fetch("set.tar", tmp_path / "to", AWS_ACCESS_KEY_ID="SOMEBODYELSE")
    assert (ended.code, ended.record["cause"]) == (65, "data")
    assert "spec.data[0].secret" in ended.record["message"]
    assert SECRET not in ended.shown
    assert "SOMEBODYELSE" not in ended.shown


def test_a_key_that_a_server_repeats_is_not_shown(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("set.tar", b"a")
    assert bucket.server is not None
    bucket.server.message = f"{ACCESS_KEY} with {SECRET} may not"
    bucket.server.faults = always("repeats", method="GET")
    ended = bucket.fetch("set.tar", tmp_path / "to")
    assert ended.code == 65
    assert "*** with *** may not" in ended.record["message"]
    assert SECRET not in ended.shown
    assert ACCESS_KEY not in ended.shown


def test_no_key_is_an_error_of_the_configuration(bucket: Bucket, tmp_path: Path) -> None:
    # nobody answers for the identity of this machine
    keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    nobody = {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}
    ended = bucket.fetch("set.tar", tmp_path / "to", **keys, **nobody)
    assert (ended.code, ended.record["cause"]) == (64, "config"), ended.stdout
    assert "set AWS_ACCESS_KEY_ID" in ended.record["message"]
    assert "spec.data[0].secret" in ended.record["message"]


def test_an_object_that_changes_meanwhile_is_fetched_from_the_start(
    bucket: Bucket, tmp_path: Path
) -> None:
    other = random.Random(2).randbytes(len(DATA))
    bucket.put("set/a", DATA, tag="v1")
    assert bucket.server is not None
    first = in_turn("change", method="GET")

    def change(request: object) -> str:
        if request.key == "set/a" and first(request):  # type: ignore[attr-defined, arg-type]
            bucket.put("set/a", other, tag="v2")
        return ""

    bucket.server.faults = change
    ended = bucket.fetch("set", tmp_path / "to")
    assert ended.code == 0, ended.stdout
    assert ended.files == {"a": other}
    assert "changed" in ended.event("data-retry")["reason"]


@pytest.mark.parametrize("name", ["set/../../outside", "set//etc/passwd", "set/./x"])
@pytest.mark.sampled
def test_a_name_that_leads_elsewhere_is_refused(bucket: Bucket, tmp_path: Path, name: str) -> None:
    bucket.put(name, b"hostile")
    bucket.put("set/a", b"a")
    ended = bucket.fetch("set", tmp_path / "to/sub")
    assert ended.code == 65, ended.stdout
    assert "hostile" not in [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
