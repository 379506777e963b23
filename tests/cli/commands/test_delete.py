"""`kdist delete -o json` says what became of each job, also if one of them fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdist.errors import Code
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.deploy.conftest import PLACES, api, file, serve, store

__all__ = ["api", "file", "serve", "store"]


@pytest.fixture(autouse=True)
def applied(api: Api, file: Path, kdist: Kdist) -> None:
    """A cluster with the job digits."""
    assert kdist("apply", str(file)).exit_code == Code.OK


def outcomes(document: dict[str, list[dict[str, str]]]) -> dict[str, str]:
    return {each["job"]: each["outcome"] for each in document["outcomes"]}


def test_a_job_that_is_not_there_hides_nothing_of_the_others(
    kdist: Kdist, store: Store, file: Path
) -> None:
    ended = kdist("delete", "nobody", "digits", "-n", "ml", "-o", "json")
    found = json.loads(ended.stdout)
    assert ended.exit_code == Code.NOT_FOUND
    assert outcomes(found) == {"nobody": "not-found", "digits": "deleted"}
    assert found["jobs"] == ["digits"]
    assert any("job" in title for title in found["deleted"])
    assert found["error"]["exitCode"] == Code.NOT_FOUND
    assert "nobody in namespace ml" in found["error"]["message"]
    assert "nobody in namespace ml" in ended.stderr
    assert PLACES["job"] not in store.objects


def test_jobs_after_one_that_fails_are_named_as_not_tried(kdist: Kdist, store: Store) -> None:
    store.may = False
    ended = kdist("delete", "nobody", "digits", "more", "-n", "ml", "-o", "json")
    found = json.loads(ended.stdout)
    assert ended.exit_code == Code.FORBIDDEN
    assert outcomes(found) == {"nobody": "not-found", "digits": "failed", "more": "not-tried"}
    assert (found["jobs"], found["error"]["reason"]) == ([], "FORBIDDEN")


def test_a_job_that_may_be_missing_is_no_error_and_is_named(kdist: Kdist) -> None:
    words = ("delete", "digits", "nobody", "--ignore-not-found", "-n", "ml", "-o", "json")
    ended = kdist(*words)
    found = json.loads(ended.stdout)
    assert (ended.exit_code, found["error"]) == (Code.OK, None)
    assert outcomes(found) == {"digits": "deleted", "nobody": "not-found"}


def test_a_single_job_that_is_not_there_is_an_error(kdist: Kdist) -> None:
    found = json.loads(kdist("delete", "nobody", "-n", "ml", "-o", "json").stdout)
    assert (found["kind"], found["exitCode"]) == ("Error", Code.NOT_FOUND)
