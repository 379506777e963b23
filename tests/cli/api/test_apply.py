"""Jobs that Python sends to an API server, and their handles."""

from __future__ import annotations

from pathlib import Path

import pytest

import kdist
from kdist.errors import Code, JobNotFoundError
from tests.cli.api.conftest import Cells
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.deploy.conftest import CORE, PLACES, api, file, serve, store

__all__ = ["api", "file", "serve", "store"]


def test_a_job_is_applied_found_and_deleted(
    api: Api, store: Store, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handle = kdist.load(file, "spec.nodes.max=4").apply(namespace="ml")
    assert (handle.name, handle.namespace) == ("digits", "ml")
    assert store.objects[PLACES["job"]]["spec"]["parallelism"] == 4
    assert kdist.load(file).set("spec.nodes.max=4").apply(namespace="ml") is not None  # idempotent
    found = kdist.get("digits", namespace="ml")
    assert found.status().nodes.max == 4
    assert [each.name for each in kdist.list_jobs(namespace="ml")] == ["digits"]
    assert "digits" in found._repr_html_()
    found.delete(purge=True)
    assert PLACES["job"] not in store.objects
    with pytest.raises(JobNotFoundError) as caught:
        found.status()
    assert caught.value.code == Code.NOT_FOUND
    with pytest.raises(JobNotFoundError):
        kdist.get("digits", namespace="ml")
    assert capfd.readouterr() == ("", "")


def test_the_code_of_a_function_is_sent_with_its_job(
    api: Api, store: Store, home: Path, cell: Cells
) -> None:
    function = cell("def train():\n    print(1)\n")["train"]
    kdist.from_code(function, image="r/i:1", backend="job").apply(namespace="ml")
    maps = [each for path, each in store.objects.items() if path.startswith(f"{CORE}/configmaps/")]
    assert sum("def train()" in str(each.get("data")) for each in maps) == 1


def test_the_error_of_a_cluster_that_cannot_be_reached_has_its_code(home: Path, file: Path) -> None:
    with pytest.raises(kdist.KdistError) as caught:
        kdist.load(file).apply(kubeconfig=str(home / "nothing"))
    assert caught.value.code == Code.UNREACHABLE
