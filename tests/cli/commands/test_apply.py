"""Jobs are sent to a server whole, again without change, and taken away in order; nothing is sent
of files with problems.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from kdist.errors import Code
from kdist.job.cluster import changes
from tests.cli.cluster.api import Api, write_kubeconfig
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist

JOBS = "/apis/batch/v1/namespaces/ml/jobs/digits"
MAPS = "/api/v1/namespaces/ml/configmaps/digits"
PODS = "/api/v1/namespaces/ml/pods"


@pytest.fixture
def store() -> Store:
    """What the server holds."""
    return Store()


@pytest.fixture
def api(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """A server that the kubeconfig leads to."""
    server = Api(store)
    write_kubeconfig(tmp_path / "config", server.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    yield server
    server.close()


@pytest.fixture
def file(tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job.yaml that may go to a cluster."""
    monkeypatch.chdir(tmp_path)
    document = yaml.safe_load(job)
    document["spec"] |= {
        "image": "registry.example.com/trainer:1",
        "backend": "job",
        "checkpoints": {"size": "1Gi"},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def run_id(store: Store) -> str:
    """The run that the cluster's ConfigMap names."""
    found: str = store.objects[MAPS]["metadata"]["annotations"]["kdist.dev/run-id"]
    return found


def test_a_second_apply_changes_nothing_and_keeps_the_run(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    first = kdist("apply", str(file))
    assert first.exit_code == Code.OK, first.stderr
    assert {line.split()[1] for line in first.stdout.splitlines()} == {"created"}
    assert f"run {run_id(store)}" in first.stderr
    run = run_id(store)
    second = kdist("apply", str(file), "--error-unchanged")
    assert second.exit_code == Code.UNCHANGED, second.stderr
    assert {line.split()[1] for line in second.stdout.splitlines()} == {"unchanged"}
    assert run_id(store) == run
    assert kdist("diff", str(file)).exit_code == 0
    changed = kdist("diff", str(file), "--set", "spec.maxRestarts=3")
    assert changed.exit_code == 1
    assert '+      "maxRestarts": 3,' in changed.stdout


def test_a_diff_chooses_the_kind_of_workload_as_apply_does(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    shown = kdist("diff", str(file), "--backend", "statefulset")
    assert shown.exit_code == 1, shown.stderr
    assert "+++ merged/StatefulSet/digits" in shown.stdout
    kdist("apply", str(file), "--backend", "statefulset")
    assert kdist("diff", str(file), "--backend", "statefulset").exit_code == 0


@pytest.mark.parametrize("output", ["text", "json"])
@pytest.mark.sampled
def test_a_diff_has_the_digest_and_the_size_of_what_is_no_text(
    api: Api, store: Store, file: Path, kdist: Kdist, output: str
) -> None:
    install = ("--set", "spec.install={wheels: {claim: wheels}}")
    shown = kdist("diff", str(file), *install, "-o", output)
    assert shown.exit_code == 1, shown.stderr
    whole = yaml.safe_load_all(kdist("render", str(file), *install).stdout)
    (data,) = (next(iter(each["binaryData"].values())) for each in whole if "binaryData" in each)
    content = b64decode(data)
    line = f": sha256 {sha256(content).hexdigest()}, {len(content):,} bytes"
    assert line in shown.stdout
    assert max(map(len, shown.stdout.replace('", "', "\n").splitlines())) < 10_000


def test_the_objects_can_be_had_as_documents(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    shown = json.loads(kdist("apply", str(file), "--dry-run=server", "-o", "json").stdout)
    assert shown["items"][-1]["kind"] == "Job"
    assert all(
        each.query["fieldManager"] == "kdist" for each in api.asked if each.method == "PATCH"
    )


def test_a_job_has_one_name_in_every_command(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    lines = [
        ("apply", "job.yaml", "--dry-run=client"),
        ("apply", "job.yaml", "--dry-run=server"),
        ("apply", "job.yaml"),
        ("get", "-n", "ml"),
        ("status", "job/digits"),
        ("delete", "job/digits", "--dry-run=client"),
        ("delete", "job/digits", "--no-wait"),
    ]
    printed = {line: kdist(*line, "-o", "name") for line in lines}
    assert {line: each.stdout for line, each in printed.items()} == dict.fromkeys(
        lines, "job/digits\n"
    ), [each.stderr for each in printed.values()]


def test_nothing_is_sent_when_one_of_the_files_has_problems(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    (file.parent / "other.yaml").write_text(
        "apiVersion: kdist.dev/v1alpha1\nkind: TrainingJob\nspec: {nodes: many}\n"
    )
    result = kdist("apply", str(file), "other.yaml")
    assert result.exit_code == Code.USAGE
    assert "other.yaml:" in result.stderr
    assert store.objects == {}


def test_a_client_dry_run_asks_nobody(
    file: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    result = kdist("apply", str(file), "--dry-run=client")
    assert result.exit_code == Code.OK
    assert "job.batch/digits created (dry run)" in result.stdout


def test_somebody_elses_object_of_that_name_is_left_alone(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    store.put(MAPS, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "digits"}})
    result = kdist("apply", str(file))
    assert result.exit_code == Code.ERROR
    problem = "configmap/digits does not belong to job digits: it is not marked as kdist's"
    assert problem in result.stderr
    assert list(store.objects) == [MAPS]


def test_who_may_not_make_roles_gets_the_rendezvous_that_needs_none(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    store.may_not = {"create roles"}
    result = kdist("apply", str(file))
    assert "rendezvous c10d" in result.stderr
    assert not any("/roles/" in path for path in store.objects)


def test_a_queued_job_begins_suspended_and_stays_as_the_queue_made_it(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file), "--set", "spec.queue=team")
    assert store.objects[JOBS]["spec"]["suspend"] is True
    store.objects[JOBS]["spec"]["suspend"] = False
    kdist("apply", str(file), "--set", "spec.queue=team")
    assert not store.objects[JOBS]["spec"].get("suspend")


def test_a_namespace_in_both_places_is_the_options_and_said(
    api: Api, file: Path, kdist: Kdist
) -> None:
    result = kdist("apply", str(file), "-n", "ml", "--set", "metadata.namespace=other")
    assert "using namespace ml (-n), not other of the job file" in result.stderr


def test_delete_takes_the_workload_first_and_keeps_the_claim(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    result = kdist("delete", "digits")
    assert result.exit_code == Code.OK, result.stderr
    assert store.deleted[0] == "jobs"
    assert [path.split("/")[-2] for path in store.objects] == ["persistentvolumeclaims"]
    assert "persistentvolumeclaim/digits-checkpoints stays" in result.stderr
    assert kdist("delete", "-f", str(file), "--purge").exit_code == Code.OK
    assert store.objects == {}
    assert kdist("delete", "digits").exit_code == Code.NOT_FOUND
    assert kdist("delete", "digits", "--ignore-not-found").exit_code == Code.OK


def test_a_pod_that_stays_ends_the_wait_with_its_name_and_node(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    kdist("apply", str(file))
    made_by = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "controller": True}
    pod = {
        "metadata": {
            "name": "digits-0",
            "labels": {"kdist.dev/job": "digits"},
            "ownerReferences": [made_by],
        },
        "spec": {"nodeName": "n1"},
    }
    store.put(f"{PODS}/digits-0", pod)
    result = kdist("delete", "digits", "--timeout", "0")
    assert result.exit_code == Code.TIMEOUT
    assert "digits still has pods after 0 s: digits-0 (on n1)" in result.stderr
    assert any("configmaps" in path for path in store.objects), (
        "the pods still need what they lean on"
    )


def test_the_doctor_finds_what_is_missing_and_says_the_fix(
    api: Api, store: Store, kdist: Kdist
) -> None:
    store.may = False
    result = kdist("doctor", "-o", "json", "--timeout", "0")
    assert result.exit_code == Code.ERROR
    assert json.loads(result.stdout)["healthy"] is False


def test_the_doctor_looks_at_this_machine_alone(
    kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    result = kdist("doctor", "--local")
    assert result.exit_code == Code.OK
    assert "✓ python" in result.stdout


def test_a_train_job_is_sent_until_trainer_has_heard_of_its_runtime(
    api: Api, store: Store, file: Path, kdist: Kdist
) -> None:
    store.deaf = 2
    result = kdist("apply", str(file), "--set", "spec.backend=trainjob")
    assert result.exit_code == Code.OK, result.stderr
    assert store.deaf == 0
    assert any("/trainjobs/" in path for path in store.objects)


def test_a_train_job_that_is_over_is_made_again_though_its_runtime_would_go_before_it(
    api: Api, store: Store, file: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_DELETE_TIMEOUT", 0.5)
    assert kdist("apply", str(file), "--set", "spec.backend=trainjob").exit_code == Code.OK
    path = next(path for path in store.objects if "/trainjobs/" in path)
    store.objects[path]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    result = kdist("restart", "digits", "--no-wait")
    assert result.exit_code == Code.OK, result.stderr
    assert "status" not in store.objects[path]
    owners = store.objects[path.replace("/trainjobs/", "/trainingruntimes/")]["metadata"][
        "ownerReferences"
    ]
    assert [owner["kind"] for owner in owners] == ["TrainJob"]


@pytest.mark.parametrize("stay", ["--wait", "--follow"])
def test_a_job_that_is_sent_is_waited_for_no_longer_than_asked(
    api: Api, file: Path, kdist: Kdist, stay: str
) -> None:
    sent = kdist("apply", str(file), stay, "--timeout", "1s")
    assert sent.exit_code == Code.TIMEOUT
    assert "has not reached `done` after 1 s" in sent.stderr


def test_an_apply_that_changes_something_notes_the_commit_of_the_files_folder(
    api: Api, store: Store, file: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted() -> str | None:
        found: str | None = store.objects[MAPS]["metadata"]["annotations"].get("kdist.dev/commit")
        return found

    commits = iter(["first", "second", ""])
    monkeypatch.setattr("kdist.deploy.job.find_commit", lambda _: next(commits))
    kdist("apply", str(file))
    assert noted() == "first"
    again = kdist("apply", str(file), "--error-unchanged")
    assert (again.exit_code, noted()) == (Code.UNCHANGED, "first"), again.stderr
    assert kdist("diff", str(file)).exit_code == 0
    kdist("apply", str(file), "--set", "spec.maxRestarts=3")
    assert noted() == "second"
    kdist("apply", str(file), "--set", "spec.maxRestarts=4")
    assert noted() is None
    assert "commit" not in json.dumps(store.objects[JOBS])
