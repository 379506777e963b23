"""`kdist get` lists the runs on this machine next to the jobs of the cluster."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from kdist.job import find
from tests.cli.cluster.api import Reply, write_kubeconfig
from tests.cli.cluster.conftest import Serve, _hurry, serve
from tests.cli.conftest import Kdist
from tests.cli.job.cluster.world import World

__all__ = ["_hurry", "serve"]


@pytest.fixture(autouse=True)
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test may write a kubeconfig; there are no runs on this machine yet."""
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return tmp_path / "config"


def add_run(tmp_path: Path, name: str) -> None:
    """A run on this machine that never started its agents."""
    run = tmp_path / "runs" / name
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"name": name, "invocations": []}))


def add_cluster(kubeconfig: Path, serve: Serve, answer: Any) -> None:
    """A cluster that answers so."""
    write_kubeconfig(kubeconfig, serve(answer).url)


def test_a_run_on_this_machine_is_listed_unless_a_namespace_is_chosen(
    kdist: Kdist, tmp_path: Path, kubeconfig: Path, serve: Serve
) -> None:
    assert kdist("get", "--local").stderr.startswith("there are no jobs on this machine\n")
    assert kdist("get", "--local", "-n", "ml").exit_code == Code.USAGE
    add_run(tmp_path, "digits")
    assert kdist("get", "-o", "name").stdout == "job/digits\n", "without a cluster"
    assert kdist("get", "--local").stdout.startswith("NAME ")
    assert kdist("get", "--local", "--no-headers").stdout.startswith("digits ")
    assert kdist("get", "--local", "none").exit_code == Code.NOT_FOUND
    add_cluster(kubeconfig, serve, lambda _: Reply(document={"items": []}))
    listed = json.loads(kdist("get", "-o", "json").stdout)["items"]
    assert [(each["name"], each["location"]) for each in listed] == [("digits", "local")]
    assert kdist("get", "-n", "ml").stdout == ""


def test_without_a_cluster_and_without_runs_the_next_step_is_named(kdist: Kdist) -> None:
    empty = kdist("get")
    assert (empty.exit_code, empty.stdout) == (Code.OK, "")
    assert empty.stderr == (
        "there are no jobs on this machine, and no kubeconfig names a cluster\nNext: kdist init\n"
    )
    assert json.loads(kdist("get", "-o", "json").stdout)["items"] == []
    assert kdist("get", "digits").exit_code == Code.NOT_FOUND


def test_runs_and_jobs_stand_in_one_table_whose_namespace_column_tells_them_apart(
    kdist: Kdist, tmp_path: Path, kubeconfig: Path, serve: Serve
) -> None:
    add_run(tmp_path, "alone")
    add_cluster(kubeconfig, serve, World())
    rows = [line.split() for line in kdist("get").stdout.splitlines()]
    assert [row[:3] for row in rows] == [
        ["NAMESPACE", "NAME", "PHASE"],
        ["ml", "digits", "Running"],
        ["(local)", "alone", "Unknown"],
    ]
    assert kdist("get", "-n", "ml").stdout.startswith("NAME ")
    listed = json.loads(kdist("get", "-o", "json").stdout)["items"]
    assert {each["name"]: each["location"] for each in listed} == {
        "alone": "local",
        "digits": "cluster",
    }


def test_a_name_that_a_run_and_a_job_share_shows_both(
    kdist: Kdist, tmp_path: Path, kubeconfig: Path, serve: Serve
) -> None:
    add_run(tmp_path, "digits")
    add_cluster(kubeconfig, serve, World())
    listed = json.loads(kdist("get", "digits", "-o", "json").stdout)["items"]
    assert [each["location"] for each in listed] == ["cluster", "local"]
    assert len(kdist("get", "digits", "--no-headers").stdout.splitlines()) == 2


def test_the_printed_names_are_accepted_by_other_commands(
    kdist: Kdist, tmp_path: Path, kubeconfig: Path, serve: Serve
) -> None:
    add_run(tmp_path, "alone")
    add_cluster(kubeconfig, serve, World())
    names = kdist("get", "-o", "name").stdout.split()
    assert names == ["job/digits", "job/alone"]
    for name in names:
        assert kdist("get", name, "-o", "name").stdout == f"{name}\n"
        assert kdist("status", name, "-o", "name").stdout == f"{name}\n"
        shown = kdist("logs", name)
        assert f"no job {name}" not in shown.stderr
        assert f"no run {name}" not in shown.stderr


def test_a_template_of_kubectl_is_refused_with_what_to_type(kdist: Kdist) -> None:
    for command in (["get"], ["get", "digits"], ["events", "digits"], ["delete", "digits"]):
        refused = kdist(*command, "-o", "jsonpath={.step}")
        assert refused.exit_code == Code.USAGE
        assert "use `-o json | jq .FIELD`" in refused.stderr


def test_labels_are_a_column_on_demand(
    kdist: Kdist, tmp_path: Path, kubeconfig: Path, serve: Serve
) -> None:
    add_run(tmp_path, "alone")
    add_cluster(kubeconfig, serve, World())
    header, *rows = [line.split() for line in kdist("get", "--show-labels").stdout.splitlines()]
    assert [header[-1], *(row[-1] for row in rows)] == ["LABELS", "kdist.dev/job=digits", "<none>"]
    assert "LABELS" not in kdist("get").stdout


def test_a_cluster_that_refuses_connections_does_not_hide_the_runs(
    kdist: Kdist, tmp_path: Path, kubeconfig: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_kubeconfig(kubeconfig, f"http://127.0.0.1:{port}")
    add_run(tmp_path, "alone")
    shown = kdist("get", "-o", "name")
    assert (shown.exit_code, shown.stdout) == (Code.OK, "job/alone\n")
    assert shown.stderr.startswith("Warning: only the runs on this machine are shown: ")
    both = kdist("get", "alone", "other")
    assert both.exit_code == Code.UNREACHABLE, "the cluster may have the other"
    assert kdist("get", "other", "--timeout", "0").exit_code == Code.UNREACHABLE
    assert kdist("get", "-n", "ml", "--timeout", "0").exit_code == Code.UNREACHABLE


def test_a_cluster_that_stays_silent_does_not_hide_the_runs(
    kdist: Kdist, tmp_path: Path, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "_PATIENCE_SECONDS", 0.1)
    add_run(tmp_path, "alone")
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        write_kubeconfig(kubeconfig, f"http://127.0.0.1:{server.getsockname()[1]}")
        shown = kdist("get", "-o", "name")
    assert (shown.exit_code, shown.stdout) == (Code.OK, "job/alone\n")
    assert "only the runs on this machine are shown" in shown.stderr
