"""Jobs that Python sends to an API server, and their handles."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import kdist
from kdist import get, load
from kdist.errors import Code, JobNotFoundError, KdistError, KdistWarning
from tests.cli.api.conftest import Cells
from tests.cli.cluster.api import Api
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
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


@pytest.mark.filterwarnings("ignore::kdist.errors.KdistWarning")
def test_an_edited_function_is_not_taken_for_the_run_that_has_finished(
    api: Api, store: Store, home: Path, cell: Cells
) -> None:
    def edit(word: str) -> kdist.JobDefinition:
        function = cell(f"def say():\n    print({word!r})\n")["say"]
        return kdist.from_code(function, image="r/i:1", backend="job")

    def code() -> set[str]:
        mounted = re.findall(r"say-code-[0-9a-f]+", json.dumps(store.objects[workload]))
        return {str(store.objects[f"{CORE}/configmaps/{name}"]["data"]) for name in mounted}

    workload = PLACES["job"].replace("digits", "say")
    edit("first").apply()
    store.objects[workload]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    done = edit("first").apply().wait(timeout=9)  # as it was: nothing to do
    assert done.phase == "Succeeded"
    with pytest.raises(KdistError, match="has already succeeded, with other code") as refused:
        edit("second").apply()
    for way in ("apply(fresh=True)", 'kdist.get("say", namespace="ml").delete()'):
        assert way in refused.value.hint
    assert not any("second" in str(each.get("data")) for each in store.objects.values())
    for fresh, word in ((False, "second"), (True, "third")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = edit(word).apply(fresh=fresh)
        assert not any("kdist restart" in str(each.message) for each in caught)
        assert store.objects[workload].get("status") is None
        assert all(word in each for each in code())
        assert run.status().phase == "Pending"
        store.objects[workload]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}


def test_a_name_that_a_run_and_a_job_have_is_warned_of(
    api: Api, store: Store, file: Path, home: Path
) -> None:
    load(file).apply(namespace="ml")
    root = home / ".kdist" / "digits"
    root.mkdir(parents=True)
    (root / "run.json").write_text('{"run_id": "1", "invocations": []}')
    with pytest.warns(KdistWarning, match="and a job on the cluster: the job is used"):
        found = get("digits")
    assert repr(found) == "<JobHandle digits in namespace ml>"


def test_an_apply_that_waits_does_not_wait_for_a_run_of_before(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    assert kdist("apply", str(file)).exit_code == Code.OK
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    store.objects[PLACES["job"]]["status"] = done
    assert kdist("apply", str(file), "--wait").exit_code == Code.OK
    for option in ("--wait", "--follow", "--wait"):
        refused = kdist("apply", str(file), "--set", "spec.image=r/i:2", option)
        assert refused.exit_code == Code.ERROR
        assert "digits is applied, but has already succeeded" in refused.stderr
        assert "Next: kdist restart digits -n ml" in refused.stderr
    assert kdist("restart", "digits", "-n", "ml", "--no-wait").exit_code == Code.OK
    assert "r/i:2" in json.dumps(store.objects[PLACES["job"]])


@pytest.fixture
def doubtful(file: Path, api: Api, store: Store) -> Path:
    """The job of `file` with credentials in a variable and in a file, and a cluster that warns."""
    document = yaml.safe_load(file.read_text())
    document["spec"]["env"] = [{"name": "API_TOKEN", "value": "0123456789abcdef0123456789abcdef"}]
    file.write_text(yaml.safe_dump(document))
    (file.parent / "src" / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    headers = {"Warning": '299 - "an old field"'}
    api.answer = lambda asked: replace(store(asked), headers=headers)
    return file


def texts(caught: pytest.WarningsRecorder) -> list[str]:
    assert {(each.category, each.filename) for each in caught} == {(KdistWarning, __file__)}
    return [str(each.message) for each in caught]


def test_an_apply_warns_of_what_the_command_warns_of_at_the_line_of_the_program(
    store: Store, doubtful: Path, kdist: Kdist, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(KdistWarning) as caught:
        load(doubtful).apply()
    assert capfd.readouterr() == ("", "")
    store.objects.clear()
    store.secrets.clear()
    lines = kdist("apply", str(doubtful)).stderr.splitlines()
    printed = [line.partition(": ")[2] for line in lines if line.startswith("Warning: ")]
    assert texts(caught) == printed
    for part in ("API_TOKEN", "id_rsa", "an old field"):
        assert sum(part in each for each in printed) == 1, printed


def test_a_job_that_was_made_in_python_is_warned_of_too(doubtful: Path) -> None:
    made = load(yaml.safe_load(doubtful.read_text()))
    assert any("API_TOKEN" in each for each in made.validate())
    with pytest.warns(KdistWarning) as caught:
        made.apply()
    assert any("API_TOKEN" in each for each in texts(caught))


def test_a_job_is_applied_and_its_commit_noted_also_where_warnings_are_errors(
    store: Store, doubtful: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KdistWarning):
            load(doubtful).apply()
    assert PLACES["job"] in store.objects
    assert (
        "kdist.dev/run-id" in store.objects[f"{CORE}/configmaps/digits"]["metadata"]["annotations"]
    )


def test_a_warning_is_given_also_where_the_apply_fails(doubtful: Path, store: Store) -> None:
    store.may = False
    with pytest.warns(KdistWarning, match="API_TOKEN"), pytest.raises(KdistError):
        load(doubtful).apply()
