"""Which job a name means, where a run on this machine and a job on the cluster have it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.cluster.api import Api, Reply, refusal, write_kubeconfig
from tests.cli.cluster.conftest import Serve, _hurry, serve
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tests.cli.job.cluster.world import World
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
    both = "--local chooses the run, -n NAMESPACE chooses the cluster"
    there = "-n NAMESPACE chooses the cluster"
    hint = there if typed[0] in ("restart", "scale") else both
    assert refused.stderr.splitlines()[1] == f"Hint: {hint}", "only options that there are"


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
    assert "the cluster cannot be queried" in shown.stderr
    assert kdist("delete", "digits").exit_code == 2


def test_a_job_file_on_stdin_names_a_run_or_a_job_on_the_cluster(
    kdist: Kdist, folder: Path, job: str
) -> None:
    for local in ((), ("--local",)):
        shown = kdist("status", "-f", "-", "-o", "name", *local, stdin=job)
        assert (shown.exit_code, shown.stdout) == (0, "job/digits\n"), shown.stderr
    (folder / "run.json").unlink()
    assert kdist("wait", "-f", "-", "--for=running", stdin=job).exit_code == 0


def test_the_namespace_in_a_job_file_is_where_all_its_jobs_are_deleted(
    kdist: Kdist, api: Api, folder: Path, tmp_path: Path, job: str
) -> None:
    """A run that has ended has the name of the first of them."""
    api.answer = store = Store()
    configured = tmp_path / "kubeconfig"
    configured.write_text(configured.read_text().replace("namespace: ml", "namespace: other"))
    first = job.replace("name: digits", "name: digits\n  namespace: ml", 1)
    file = tmp_path / "jobs.yaml"
    file.write_text(f"{first}---\n{first.replace('name: digits', 'name: letters', 1)}")
    applied = kdist("apply", str(file), "--set", "spec.image=trainer:1")
    assert applied.exit_code == 0, applied.stderr
    deleted = kdist("delete", "-f", str(file), "-o", "name")
    assert (deleted.exit_code, deleted.stdout) == (0, "job/digits\njob/letters\n"), deleted.stderr
    assert store.objects == {}
    assert (folder / "run.json").is_file()
    assert not [asked.path for asked in api.asked if "/namespaces/other" in asked.path]


def test_a_timeout_of_requests_chooses_no_cluster(kdist: Kdist, api: Api) -> None:
    api.answer = lambda _: refusal(404, "not found", "NotFound", name="digits")
    assert _location(kdist, "--request-timeout", "5s") == "local"
    api.answer = lambda _: Reply(document={"items": []})
    assert kdist("get", "--request-timeout", "5s", "-o", "name").stdout == "job/digits\n"


def test_whoever_may_not_list_jobs_reads_so_next_to_the_runs(kdist: Kdist, api: Api) -> None:
    what = 'cannot list resource "configmaps" in API group "" in the namespace "ml"'
    said = f'configmaps is forbidden: User "jo" {what}'
    api.answer = lambda _: refusal(403, said, "Forbidden")
    shown = kdist("get", "-o", "name")
    assert (shown.exit_code, shown.stdout) == (0, "job/digits\n")
    assert shown.stderr.startswith("Warning: only the runs on this machine are shown: ")
    assert "answer" not in shown.stderr, "the cluster has answered"
    both = kdist("get", "digits", "other")
    assert (both.exit_code, both.stdout) == (7, "")
    assert "are shown" not in both.stderr, "nothing is"


def test_all_runs_on_this_machine_are_deleted_without_asking_the_cluster(
    kdist: Kdist, api: Api, folder: Path
) -> None:
    other = folder.parent / "letters"
    other.mkdir()
    (other / "run.json").write_text((folder / "run.json").read_text())
    every = ("delete", "--all", "--local")
    planned = kdist(*every, "--dry-run=client").stdout.splitlines()
    assert planned == [f"run {each} deleted (client dry run)" for each in (folder, other)]
    assert kdist(*every, "-o", "name").stdout == "job/digits\njob/letters\n"
    assert [each.name for each in folder.iterdir()] == ["checkpoints"]
    assert not other.exists()
    assert kdist(*every).stderr == "there are no runs on this machine\n"
    assert api.asked == []


def test_no_run_is_deleted_if_one_of_them_is_refused(
    kdist: Kdist, folder: Path, active: None
) -> None:
    other = folder.parent / "aaa"
    other.mkdir()
    (other / "run.json").write_text((folder / "run.json").read_text())
    assert kdist("delete", "--all", "--local", "--no-wait").exit_code == 2
    assert other.exists()
    refused = kdist("delete", "--local", "-l", "team=vision")
    assert (refused.exit_code, "runs on this machine have no labels" in refused.stderr) == (2, True)


def test_without_a_cluster_a_name_that_no_run_has_is_deleted_already(
    kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "nowhere")
    refused = kdist("delete", "other", "another")
    assert refused.exit_code == 4
    assert "there is no run other, nor another on this machine" in refused.stderr
    assert kdist("delete", "other", "--ignore-not-found").exit_code == 0
    for local in ((), ("--local",)):
        assert kdist("wait", "other", *local).exit_code == 4
        gone = kdist("wait", "other", "--for=deleted", *local)
        assert (gone.exit_code, gone.stdout) == (0, "other is deleted\n")


def test_the_agents_of_a_run_are_no_objects_of_a_cluster(
    kdist: Kdist, active: None, folder: Path
) -> None:
    (folder / "node-0").mkdir()
    assert "  | node-0: Starting\n" in kdist("why", "digits").stdout


def test_a_dry_run_refuses_what_the_command_would_refuse(
    kdist: Kdist, active: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "nowhere")
    (folder / "lock").write_text(str(os.getpid()))
    assert kdist("suspend", "digits", "--dry-run=client").stdout == (
        "digits would be suspended (client dry run)\n"
    )
    assert kdist("resume", "digits", "--dry-run=client").stdout == "digits is not suspended\n"
