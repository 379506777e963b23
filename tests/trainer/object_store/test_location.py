"""Locations: what they are made of, and that they contain no credential."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import characters, from_regex

from kdist.spec.models import BUCKET
from kdist_trainer.object_store.store import ObjectLocation, check_name


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_location_is_a_bucket_and_a_prefix(scheme: str) -> None:
    location = ObjectLocation(f"{scheme}://my-bucket/team/run 1/")
    assert (location.scheme, location.bucket, location.prefix) == (
        scheme,
        "my-bucket",
        "team/run 1",
    )
    assert str(location) == f"{scheme}://my-bucket/team/run 1"
    assert ObjectLocation("s3://my-bucket").prefix == ""


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


@given(from_regex(BUCKET, fullmatch=True, alphabet=characters(max_codepoint=127)))
def test_every_url_that_a_job_may_have_is_a_location(url: str) -> None:
    assert ObjectLocation(url).url == url.rstrip("/")


@pytest.mark.parametrize("name", ["", "/a", "a/", "a/../b", "a" * 1000])
def test_a_name_that_leaves_the_location_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name of an object"):
        check_name(name)
