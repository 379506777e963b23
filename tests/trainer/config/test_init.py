"""`spec.train.init`: weights from one place, whose URL shows nothing secret."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kdist_trainer.config import Init
from kdist_trainer.config.sources import base_name, find_problem


@pytest.mark.parametrize(
    "document",
    [
        {"path": "/data/model.safetensors"},
        {"url": "s3://bucket/models/one", "endpoint": "http://10.0.0.1:9000", "region": "eu-1"},
        {"url": "gs://bucket/model.safetensors", "secret": "store", "size": "30Gi"},
        {"url": "https://example.com:8443/a%20b/m.safetensors.index.json", "sha256": "0" * 64},
        {"url": "hf://owner/model", "endpoint": "https://hub.example.com"},
        {"url": "hf://owner/model@refs/pr/7/folder"},
        {"url": "hf://owner/model@v1.0/model.safetensors", "secret": "hub"},
    ],
)
def test_weights_come_from_a_path_or_a_url(document: dict[str, Any]) -> None:
    init = Init.model_validate(document)
    assert init.source == document.get("path", document.get("url"))


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({}, "needs exactly one of path and url"),
        ({"path": "/a", "url": "s3://bucket/a"}, "needs exactly one of path and url"),
        ({"path": "/a", "secret": "store"}, "secret belongs to what is fetched: it needs url"),
        ({"url": "ftp://host/file"}, "url must start with s3://, gs://"),
        ({"url": "s3://Bucket/a"}, "the bucket in lower case"),
        ({"url": "s3://bucket/../a"}, "`.`, `..` or nothing between two slashes"),
        ({"url": "https://host/"}, "ends with the name of a file"),
        ({"url": "hf://model"}, "must be hf://OWNER/NAME"),
        ({"url": "https://host/a?sig=b"}, "must not contain a query or a fragment"),
        ({"url": "https://host/a", "endpoint": "https://b"}, "endpoint is for s3://, az:// and hf"),
        ({"url": "hf://owner/a", "region": "eu"}, "region is for s3:// only"),
        ({"url": "s3://bucket/a", "endpoint": "10.0.0.1"}, "endpoint"),
        ({"url": "s3://bucket/a", "sha256": "abc"}, "sha256"),
        ({"url": "s3://bucket/a", "size": "0Gi"}, "size"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(
    document: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        Init.model_validate(document)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@host/file",
        "s3://KEY:hunter2@bucket/a",
        "hf://me:hunter2@owner/model",
        "https://host/file?token=hunter2",
        "https://host/file#hunter2",
    ],
)
def test_a_problem_never_repeats_a_credential(url: str) -> None:
    assert find_problem(url)
    assert "hunter2" not in find_problem(url)


def test_the_name_of_a_file_is_the_last_part_of_its_path() -> None:
    assert base_name("https://host/a/b%20c.safetensors") == "b%20c.safetensors"
    assert base_name("s3://bucket/models/one/") == "one"
    assert base_name("hf://owner/model@v1/folder/m.safetensors") == "m.safetensors"
    assert base_name("hf://owner/model@v1") == ""
