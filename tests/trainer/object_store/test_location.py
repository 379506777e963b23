"""Locations: what they are made of, and that they contain no credential."""

from __future__ import annotations

import json

import pytest

from kdist_trainer.object_store.location import ObjectLocation


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_location_is_a_bucket_and_a_prefix(scheme: str) -> None:
    location = ObjectLocation(f"{scheme}://my-bucket/team/run 1/")
    assert (location.scheme, location.bucket, location.prefix) == (
        scheme,
        "my-bucket",
        "team/run 1",
    )
    assert str(location) == f"{scheme}://my-bucket/team/run 1"
    assert location.join("step-1/lock.json").prefix == "team/run 1/step-1/lock.json"
    assert ObjectLocation("s3://my-bucket/").join("a").url == "s3://my-bucket/a"
    assert ObjectLocation("s3://my-bucket").prefix == ""


def test_a_location_survives_json() -> None:
    location = ObjectLocation("s3://bucket/a", endpoint="https://minio:9000/", region="eu-west-1")
    assert location.endpoint == "https://minio:9000"
    assert ObjectLocation.from_json(json.loads(json.dumps(location.to_json()))) == location
    assert ObjectLocation("gs://bucket").to_json() == {"url": "gs://bucket"}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("bucket/prefix", "starts with one of"),
        ("https://bucket/prefix", "starts with one of"),
        ("file:///data", "starts with one of"),
        ("s3:///prefix", "no name of a bucket"),
        ("s3://B/prefix", "no name of a bucket"),
        ("s3://my_bucket:80/prefix", "no name of a bucket"),
        ("s3://bucket/a//b", "no name of an object"),
        ("s3://bucket/../b", "no name of an object"),
        ("s3://bucket/ä", "no name of an object"),
        ("s3://bucket/a?versionId=1", "no user, password or query"),
        ("s3://bucket/a#b", "no user, password or query"),
        ("s3://[bucket/a", "is a URL"),
    ],
)
def test_what_is_no_location_is_refused(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ObjectLocation(url)


@pytest.mark.parametrize(
    ("endpoint", "region", "says"),
    [
        ("minio:9000", "", "starts with http"),
        ("ftp://minio", "", "starts with http"),
        ("https://", "", "starts with http"),
        ("", "EU west", "no region"),
    ],
)
def test_what_reaches_no_service_is_refused(endpoint: str, region: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ObjectLocation("s3://bucket", endpoint=endpoint, region=region)


def test_a_credential_is_refused_and_not_repeated() -> None:
    for arguments in (
        {"url": "s3://key:hunter22@bucket/a"},
        {"url": "az://bucket/a?sig=hunter22"},
        {"url": "s3://bucket", "endpoint": "https://key:hunter22@minio"},
        {"url": "s3://bucket", "endpoint": "https://minio?token=hunter22"},
    ):
        with pytest.raises(ValueError, match="come from the environment") as refused:
            ObjectLocation(**arguments)
        assert "hunter22" not in str(refused.value)


@pytest.mark.parametrize(
    "document",
    [{}, {"url": 1}, {"url": "s3://bucket", "secret": "x"}, {"url": "s3://bucket", "region": None}],
)
def test_a_document_that_is_no_location_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a location"):
        ObjectLocation.from_json(document)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a/../b", "a" * 1000])
def test_a_name_that_leaves_the_location_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name of an object"):
        ObjectLocation("s3://bucket/a").join(name)
