"""Objects of others: read on the condition that they are the listed version, whatever their
names.
"""

from __future__ import annotations

import time

import pytest

from kdist_trainer.object_store.errors import ObjectAccessError, ObjectChangedError
from kdist_trainer.object_store.errors import ObjectCredentialError as CredentialError
from kdist_trainer.object_store.store import ObjectLocation, ObjectStore, Tag, check_readable
from tests.trainer.object_store.conftest import Open
from tests.trainer.object_store.s3_server import BUCKET, Entry, S3Server


def test_a_range_is_of_the_version_that_was_listed(any_store: ObjectStore) -> None:
    first = any_store.put("name", b"first")
    (listed,) = any_store.list()
    assert listed.tag == any_store.info("name").tag == Tag(first.etag)
    assert bytes(any_store.read_range("name", 1, 3, 5, listed.tag)) == b"irs"
    any_store.put("name", b"other")
    with pytest.raises(ObjectChangedError):
        any_store.read_range("name", 1, 3, 5, listed.tag)
    assert bytes(any_store.read_range("name", 1, 3, 5)) == b"the"


def test_names_that_we_would_not_give_can_be_read(store: ObjectStore, server: S3Server) -> None:
    for name in ("hash#1", "p%20c", "ü", "star*"):
        server.objects[name] = Entry(name.encode(), '"tag"', time.time())
        with pytest.raises(ValueError, match="is no name of an object"):
            store.info(name)
    location = ObjectLocation(f"s3://{BUCKET}", endpoint=server.endpoint)
    others = ObjectStore(location, any_names=True)
    for found in others.list():
        assert others.get(found.name, 100).data.decode() == found.name


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\0b", "a\nb"])
def test_a_name_that_is_no_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of an object that can be read"):
        check_readable(name)


def test_a_missing_credential_is_told_from_a_refused_one(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEBODYELSE")
    with pytest.raises(ObjectAccessError) as refused:
        open_store().info("name")
    assert not isinstance(refused.value, CredentialError)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CredentialError):
        open_store().info("name")
