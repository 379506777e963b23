"""Which job a name means, where a run on this machine and a job on the cluster have it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.cluster.api import Api, refusal, write_kubeconfig
from tests.cli.cluster.conftest import Serve, _hurry, serve
from tests.cli.conftest import Kdist
from tests.cli.jobs.world import World
from tests.cli.status.objects import config_map

__all__ = ["_hurry", "serve"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run digits that is done."""
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    found = tmp_path / "runs" / "digits"
    (found / "checkpoints").mkdir(parents=True)
    begun = {"started": 1.0, "ended": 2.0, "outcome": "done"}
    document = {
        "run_id": "a",
        "created": 1.0,
        "checkpoints": str(found / "checkpoints"),
        "invocations": [begun],
    }
    (found / "run.json").write_text(json.dumps(document))
    return found


@pytest.fixture(autouse=True)
def api(folder: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    """The cluster of the kubeconfig, which has a job digits too."""
    world = World()
    world.config_map = config_map(owner="digits/configmap/digits")
    found = serve(world)
    write_kubeconfig(tmp_path / "kubeconfig", found.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return found


@pytest.fixture
def active(folder: Path) -> Iterator[None]:
    """A `kdist run` that holds the folder: this process."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    os.close(lock)


def _location(kdist: Kdist, *options: str) -> str:
    return str(json.loads(kdist("status", "digits", "-o", "json", *options).stdout)["location"])


def test_a_job_on_the_cluster_comes_before_a_run_that_has_ended(kdist: Kdist) -> None:
    shown = kdist("status", "digits", "-o", "json")
    assert json.loads(shown.stdout)["location"] == "cluster"
    assert "the job is used; --local chooses the run" in shown.stderr
    assert _location(kdist, "--local") == "local"
    for verb in ("report", "checkpoints"):
        shown = kdist(verb, "digits")
        assert shown.stderr.count("the job is used; --local chooses the run") == 1, verb
    assert "digits: Succeeded" in kdist("wait", "digits", "--local").stdout


@pytest.mark.usefixtures("active")
def test_an_active_run_comes_before_a_job_on_the_cluster(kdist: Kdist, api: Api) -> None:
    shown = kdist("status", "digits", "-o", "json")
    assert json.loads(shown.stdout)["location"] == "local"
    assert shown.stderr == "digits is a run on this machine; -n NAMESPACE chooses the cluster\n"
    assert not api.asked, "the cluster is not asked"
    assert _location(kdist, "-n", "ml") == "cluster"


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize(
    "typed", [("delete",), ("suspend",), ("resume",), ("restart",), ("scale", "--nodes", "2")]
)
def test_what_changes_a_job_asks_which_one_is_meant(kdist: Kdist, typed: tuple[str, ...]) -> None:
    refused = kdist(typed[0], "digits", *typed[1:])
    assert refused.exit_code == 2
    assert "digits is a run on this machine and a job on the cluster" in refused.stderr
    assert "--local chooses the run, -n NAMESPACE the job on the cluster" in refused.stderr


def test_a_run_that_is_done_is_not_in_the_way_of_the_job_on_the_cluster(
    kdist: Kdist, folder: Path
) -> None:
    changed = kdist("delete", "digits", "--dry-run=client")
    assert changed.exit_code == 0, changed.stderr
    assert "deleted (client dry run)" in changed.stdout
    assert "run " not in changed.stdout.replace("dry run", "")
    assert "the job is used; --local chooses the run" in changed.stderr
    assert kdist("delete", "digits", "--local", "--purge").exit_code == 0
    assert not folder.exists()


def test_a_run_that_the_cluster_does_not_know_is_the_one_that_is_meant(
    kdist: Kdist, api: Api, folder: Path
) -> None:
    api.answer = lambda _: refusal(404, "not found", "NotFound", name="digits")
    assert _location(kdist) == "local"
    refused = kdist("restart", "digits")
    assert (refused.exit_code, "digits is a run on this machine" in refused.stderr) == (2, True)
    assert "no `kdist run` is running" in kdist("top", "digits", "--once").stderr
    assert kdist("delete", "digits").stdout == f"run {folder} deleted\n"


def test_while_the_cluster_does_not_answer_a_run_is_shown_but_not_changed(
    kdist: Kdist, api: Api
) -> None:
    api.answer = lambda _: refusal(503, "try later", "ServiceUnavailable")
    shown = kdist("status", "digits", "-o", "json")
    assert json.loads(shown.stdout)["location"] == "local"
    assert "the cluster cannot be asked" in shown.stderr
    assert kdist("delete", "digits").exit_code == 2
