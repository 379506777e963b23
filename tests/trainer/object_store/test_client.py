"""How a store is reached: credentials from the environment, and errors that say what to set and
show no secret.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kdist_trainer.object_store.errors import ObjectAccessError, ObjectStoreError
from kdist_trainer.object_store.store import ObjectLocation, ObjectStore
from tests.trainer.object_store.conftest import Open
from tests.trainer.object_store.s3_server import SECRET, S3Server, always

NOBODY = "http://127.0.0.1:1"  # where connections are refused


def requests_of(store: ObjectStore) -> dict[str, Callable[[], object]]:
    """Every operation of a store."""

    def write() -> None:
        with store.create("name") as file:
            file.write(b"content")

    return {
        "get": lambda: store.get("name", 1),
        "info": lambda: store.info("name"),
        "put": lambda: store.put("name", b""),
        "put_new": lambda: store.put_new("name", b""),
        "list": store.list,
        "list_folders": store.list_folders,
        "delete": lambda: store.delete("name"),
        "delete_prefix": lambda: store.delete_prefix("name"),
        "create": write,
        "open": lambda: store.open("name", 1).read(),
        "stream": lambda: list(store.stream("name")),
    }


def test_a_refused_key_is_an_error_that_says_what_to_set(
    open_store: Open, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEBODYELSE")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session-token")
    for name, request in requests_of(open_store()).items():
        with pytest.raises(ObjectAccessError, match="set AWS_ACCESS_KEY_ID") as refused:
            request()
        assert "s3://bucket/a/prefix" in str(refused.value), name
        assert SECRET not in repr(refused.value)
        assert "a-session-token" not in repr(refused.value)
        assert refused.value.errno == 13
    assert server.objects == {}


def test_the_session_token_is_sent(
    open_store: Open, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session-token")
    open_store().put("name", b"")
    assert server.requests[-1].headers["x-amz-security-token"] == "a-session-token"


def test_without_any_credential_it_ends_soon_and_says_what_to_set(
    open_store: Open, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", NOBODY)
    with pytest.raises(ObjectAccessError, match=r"no credential.*; set AWS_ACCESS_KEY_ID"):
        open_store(retry_seconds=600).get("name", 1)
    assert server.requests == []


def test_an_identity_that_cannot_be_had_names_its_cause(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(ObjectAccessError, match=r"no credential could be obtained .*tmp.*token"):
        open_store(retry_seconds=600).get("name", 1)


@pytest.mark.parametrize(
    ("url", "names"),
    [("gs://bucket/a", "GOOGLE_APPLICATION_CREDENTIALS"), ("az://bucket/a", "AZURE_STORAGE")],
)
def test_another_cloud_names_its_own_settings(
    url: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    with pytest.raises(ObjectAccessError, match=names) as refused:
        ObjectStore(ObjectLocation(url)).get("name", 1)
    assert url in str(refused.value)


def test_a_secret_that_a_server_repeats_is_not_shown(open_store: Open, server: S3Server) -> None:
    server.message = f"cannot verify {SECRET} of https://host/a?signature=abc"
    with (
        server.failing(always("repeats")),
        pytest.raises(ObjectStoreError, match=r"verify \*\*\* of https://host/a$") as refused,
    ):
        open_store().get("name", 1)
    assert SECRET not in repr(refused.value)


def test_the_environment_names_the_region_that_the_location_leaves_open(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    for region in ("", "ap-south-1"):
        location = ObjectLocation("s3://bucket", endpoint=server.endpoint, region=region)
        ObjectStore(location).put("name", b"")
        assert f"/{region or 'eu-north-1'}/s3/" in server.requests[-1].headers["authorization"]


def test_a_store_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ImportError, match=r"pip install 'obstore>=0\.12'"):
        ObjectStore(ObjectLocation("s3://bucket"))
