"""The commands act on a job through its TrainingJob, where the cluster serves them, and the real
controller does the rest.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist import load
from kdist.cluster import ApiError
from kdist.errors import Code, KdistError, KdistWarning
from kdist.job.cluster import wait
from kdist.manifest import CODE_SENT
from tests.cli.cluster.api import Api
from tests.cli.conftest import Kdist, kdist
from tests.cli.deploy.claim import ClaimServer
from tests.controller.conftest import Stepper
from tests.controller.kubernetes import Kubernetes

__all__ = ["kdist"]

JOB: dict[str, Any] = {
    "apiVersion": "kdist.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "digits"},
    "spec": {
        "image": "registry.example.com/trainer:1",
        "backend": "job",
        "nodes": {"min": 1, "max": 3},
        "checkpoints": {"size": "1Gi"},
        "train": {"workload": "digits", "epochs": 1},
    },
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job.yaml in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "job.yaml")


def write(path: Path, **spec: Any) -> Path:
    """A job.yaml with these fields changed."""
    path.write_text(yaml.safe_dump({**JOB, "spec": {**JOB["spec"], **spec}}))
    return path


@pytest.fixture
def controller(stepper: Stepper) -> Iterator[None]:
    """A controller that works until the test ends."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.05):
            try:
                stepper.settle()
            except ApiError as error:  # a change of the command's came in between: it looks again
                if error.status != HTTPStatus.CONFLICT:
                    raise

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join()


def spec(kubernetes: Kubernetes) -> dict[str, Any]:
    """The spec of the TrainingJob."""
    found = kubernetes.find("TrainingJob", "digits")
    assert found is not None, sorted(kubernetes.names())
    return dict(found["spec"])


@pytest.mark.usefixtures("controller")
def test_apply_sends_a_trainingjob_with_the_fields_that_were_set(
    kubernetes: Kubernetes, file: Path, kdist: Kdist
) -> None:
    sent = kdist("apply", "job.yaml")
    assert sent.exit_code == Code.OK, sent.stderr
    assert sent.stdout == "trainingjob.kdist.dev/digits created\n"
    assert spec(kubernetes) == JOB["spec"]
    assert kubernetes.find("Job", "digits") is not None
    again = kdist("apply", "job.yaml", "--error-unchanged")
    assert (again.exit_code, again.stdout) == (3, "trainingjob.kdist.dev/digits unchanged\n")
    shown = kdist("diff", "job.yaml", "--set", "spec.maxRestarts=7")
    assert shown.exit_code == 1
    assert "+  maxRestarts: 7" in shown.stdout
    assert kdist("get", "-n", "ml", "-o", "name").stdout == "job/digits\n"


@pytest.mark.usefixtures("controller")
def test_large_code_goes_to_the_claim_before_there_is_a_trainingjob(
    kubernetes: Kubernetes, api: Api, tmp_path: Path, file: Path, kdist: Kdist
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "table.bin").write_bytes(bytes(3_000_000))
    write(file, code="./src")
    claim = ClaimServer(api.answer, tmp_path / "claim")
    api.answer = claim
    sent = kdist("apply", "job.yaml")
    assert sent.exit_code == Code.OK, sent.stderr
    assert sent.stdout == "trainingjob.kdist.dev/digits created\n"
    code = spec(kubernetes)["code"]
    assert code["claim"] == "digits-checkpoints"
    assert (claim.root / code["subPath"] / "table.bin").stat().st_size == 3_000_000
    created = [kind for method, kind, _ in kubernetes.writes if kind in ("Pod", "Job")]
    assert created.index("Pod") < created.index("Job")
    again = kdist("apply", "job.yaml", "--error-unchanged")
    assert again.exit_code == Code.UNCHANGED, again.stderr
    assert len(claim.pods) == 1
    for name in ("digits", "digits-checkpoints"):
        found = kubernetes.find("ConfigMap", name) or kubernetes.find("PersistentVolumeClaim", name)
        assert found is not None
        assert CODE_SENT not in found["metadata"].get("annotations", {})
    grown = kdist("apply", "job.yaml", "--set", "spec.checkpoints.size=2Gi")
    assert grown.exit_code == Code.OK, grown.stderr


@pytest.mark.usefixtures("controller")
def test_suspend_resume_scale_and_restart_change_only_the_trainingjob(
    kubernetes: Kubernetes, file: Path, kdist: Kdist
) -> None:
    assert kdist("apply", "job.yaml").exit_code == Code.OK
    commands = (
        ("suspend", "digits", "-n", "ml", "--no-wait"),
        ("resume", "digits", "-n", "ml", "--no-wait"),
        ("scale", "digits", "-n", "ml", "--nodes", "2", "--no-wait"),
        ("restart", "digits", "-n", "ml", "--no-wait"),
    )
    seen = []
    for command in commands:
        done = kdist(*command)
        assert done.exit_code == Code.OK, (command, done.stderr)
        seen.append(spec(kubernetes))
    assert [each.get("suspend") for each in seen] == [True, False, False, False]
    assert [each.get("replicas") for each in seen] == [None, None, 2, 2]
    assert "restartedAt" in seen[-1]
    assert "restartedAt" not in seen[-2]


@pytest.mark.usefixtures("controller")
def test_a_size_beyond_the_limits_changes_the_limits(
    kubernetes: Kubernetes, file: Path, kdist: Kdist
) -> None:
    kdist("apply", "job.yaml")
    kdist("scale", "digits", "-n", "ml", "--nodes", "2", "--no-wait")
    done = kdist("scale", "digits", "-n", "ml", "--nodes", "2:5", "--no-wait")
    assert done.exit_code == Code.OK, done.stderr
    assert spec(kubernetes)["nodes"] == {"min": 2, "max": 5}
    assert spec(kubernetes).get("replicas") is None


@pytest.mark.usefixtures("controller")
@pytest.mark.parametrize("purge", [False, True])
def test_delete_takes_the_trainingjob_and_keeps_the_claim_unless_purged(
    kubernetes: Kubernetes, file: Path, kdist: Kdist, purge: bool
) -> None:
    kdist("apply", "job.yaml")
    done = kdist("delete", "digits", "-n", "ml", "--no-wait", *(["--purge"] if purge else []))
    assert done.exit_code == Code.OK, done.stderr
    assert "trainingjob.kdist.dev/digits deleted" in done.stdout
    left = kubernetes.names()
    assert ("TrainingJob", "digits") not in left
    assert ("ConfigMap", "digits") not in left
    assert (("PersistentVolumeClaim", "digits-checkpoints") in left) is not purge


@pytest.mark.usefixtures("controller")
def test_delete_does_not_suspend_a_job_whose_pods_have_ended(
    kubernetes: Kubernetes, file: Path, kdist: Kdist
) -> None:
    kdist("apply", "job.yaml")
    workload = kubernetes.find("Job", "digits")
    assert workload is not None
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "controller": True}
    owner["uid"] = workload["metadata"]["uid"]
    metadata = {"name": "digits-0-x", "labels": {"kdist.dev/job": "digits"}}
    pod = {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": {"nodeName": "a"}}
    kubernetes.put("Pod", {**pod, "status": {"phase": "Succeeded"}})
    done = kdist("delete", "digits", "-n", "ml", "--timeout", "5s")
    assert done.exit_code == Code.OK, done.stderr
    assert kubernetes.names() == {("PersistentVolumeClaim", "digits-checkpoints")}


@pytest.mark.usefixtures("controller")
def test_a_code_folder_travels_in_a_configmap_that_goes_with_the_job(
    kubernetes: Kubernetes, file: Path, kdist: Kdist
) -> None:
    inner = file.parent / "src" / "models"
    inner.mkdir(parents=True)
    (inner / "mine.py").write_text("answer = 41\n")
    (file.parent / "src" / "train.py").write_text("print(1)\n")
    write(file, code="./src")
    sent = kdist("apply", "job.yaml")
    assert sent.exit_code == Code.OK, sent.stderr
    code = spec(kubernetes)["code"]
    files = kubernetes.find("ConfigMap", code["configMap"])
    owner = kubernetes.find("TrainingJob", "digits")
    assert files is not None
    assert owner is not None
    assert [each["uid"] for each in files["metadata"]["ownerReferences"]] == [
        owner["metadata"]["uid"]
    ]
    paths = {each["path"]: files["data"][each["key"]] for each in code["items"]}
    assert paths == {"models/mine.py": "answer = 41\n", "train.py": "print(1)\n"}
    workload = json.dumps(kubernetes.find("Job", "digits"))
    assert f'"name": "{code["configMap"]}"' in workload
    assert '"path": "models/mine.py"' in workload


@pytest.mark.usefixtures("controller")
def test_a_job_that_was_sent_the_other_way_is_refused_with_the_way_out(
    kubernetes: Kubernetes, file: Path, kdist: Kdist
) -> None:
    kdist("apply", "job.yaml")
    direct = kdist("apply", "job.yaml", "--direct")
    assert direct.exit_code == Code.ERROR
    assert "digits in namespace ml is a TrainingJob" in direct.stderr
    kdist("delete", "digits", "-n", "ml", "--no-wait", "--purge")
    assert kdist("apply", "job.yaml", "--direct").exit_code == Code.OK
    before = kubernetes.names()
    refused = kdist("apply", "job.yaml")
    assert refused.exit_code == Code.ERROR
    assert "was applied without a TrainingJob" in refused.stderr
    assert "`kdist delete digits -n ml` keeps the checkpoints" in refused.stderr
    assert kubernetes.names() == before


def test_without_a_controller_the_job_is_sent_and_its_absence_is_told(
    kubernetes: Kubernetes,
    api: Any,
    stepper: Stepper,
    file: Path,
    kdist: Kdist,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait, "ANSWER_SECONDS", 0.5)
    sent = kdist("apply", "job.yaml")
    assert sent.exit_code == Code.OK, sent.stderr
    assert "no controller has acted on it" in sent.stderr
    assert "Next: kdist doctor -n ml" in sent.stderr
    listed = json.loads(kdist("get", "digits", "-n", "ml", "-o", "json").stdout)
    assert (listed["phase"], listed["nodes"]["max"]) == ("Pending", 3)
    shown = kdist("status", "digits", "-n", "ml")
    assert shown.exit_code == Code.OK, shown.stderr
    cause = json.loads(kdist("why", "digits", "-n", "ml", "-o", "json").stdout)
    assert cause["cause"] == "controller-absent"
    assert kdist("delete", "digits", "-n", "ml").exit_code == Code.OK
    assert kubernetes.find("TrainingJob", "digits") is None


@pytest.mark.usefixtures("controller")
def test_what_the_controller_does_not_accept_is_told_by_every_command(
    kubernetes: Kubernetes, file: Path, kdist: Kdist
) -> None:
    found = {**JOB["spec"], "nodes": {"min": 3, "max": 2}}
    kubernetes.put("TrainingJob", {"metadata": {"name": "digits"}, "spec": found})
    waited = kdist("wait", "digits", "-n", "ml", "--timeout", "20s")
    assert waited.exit_code == Code.USAGE
    assert "is not accepted: spec.nodes" in waited.stderr
    shown = json.loads(kdist("status", "digits", "-n", "ml", "-o", "json").stdout)
    assert (shown["phase"], shown["reason"]) == ("Pending", "NotAccepted")
    why = json.loads(kdist("why", "digits", "-n", "ml", "-o", "json").stdout)
    assert why["cause"] == "not-accepted"
    done = kdist("suspend", "digits", "-n", "ml", "--no-wait")
    assert done.exit_code != Code.OK
    assert "is not accepted" in done.stderr
    assert "Next: kdist why digits -n ml" in done.stderr


def test_one_delete_takes_what_an_orphaning_delete_has_left_and_the_job_applied_again(
    kubernetes: Kubernetes, stepper: Stepper, file: Path, kdist: Kdist
) -> None:
    kubernetes.put("TrainingJob", yaml.safe_load(file.read_text()))
    stepper.settle()
    for kind, name in kubernetes.names():  # as the garbage collector does
        found = kubernetes.find(kind, name) or {}
        owners = found["metadata"].get("ownerReferences") or [{}]
        if owners[0].get("kind") == "TrainingJob":
            kubernetes.put(kind, {"metadata": {"name": name, "ownerReferences": None}})
    kubernetes.remove("TrainingJob", "digits")
    assert ("Pod", "digits-0") in kubernetes.names()
    kubernetes.put("TrainingJob", yaml.safe_load(file.read_text()))
    began = time.monotonic()
    done = kdist("delete", "digits", "-n", "ml", "--timeout", "60s")
    assert done.exit_code == Code.OK, done.stderr
    assert time.monotonic() - began < 60 / 2, "nothing waits for its time-out"
    assert kubernetes.names() == {("PersistentVolumeClaim", "digits-checkpoints")}


def test_pods_that_nothing_owns_stay_unless_a_user_says_that_they_are_the_jobs(
    kubernetes: Kubernetes, stepper: Stepper, file: Path, kdist: Kdist
) -> None:
    kubernetes.put("TrainingJob", yaml.safe_load(file.read_text()))
    stepper.settle()
    kubernetes.remove("TrainingJob", "digits")
    labels = {"kdist.dev/job": "digits"}
    kubernetes.put("ConfigMap", {"metadata": {"name": "web"}})
    uid = (kubernetes.find("ConfigMap", "web") or {})["metadata"]["uid"]
    theirs = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "web", "uid": uid}]
    for name, owners in (("left-0", None), ("left-1", None), ("web-0", theirs)):
        metadata = {"name": name, "labels": labels, "ownerReferences": owners}
        kubernetes.put("Pod", {"metadata": metadata, "status": {"phase": "Succeeded"}})
    done = kdist("delete", "digits", "-n", "ml", "--ignore-not-found", "--timeout", "20s")
    assert done.exit_code == Code.OK, done.stderr
    assert "left-0, left-1: no workload owns these pods" in done.stderr
    assert "`kdist delete digits --orphans -n ml` deletes them" in done.stderr
    pods = {name for kind, name in kubernetes.names() if kind == "Pod"}
    assert pods == {"left-0", "left-1", "web-0"}
    tried = kdist("delete", "digits", "-n", "ml", "--orphans", "--dry-run", "client")
    assert tried.stdout.splitlines() == [
        "pod/left-0 deleted (client dry run)",
        "pod/left-1 deleted (client dry run)",
    ]
    done = kdist("delete", "digits", "-n", "ml", "--orphans", "--timeout", "20s")
    assert done.exit_code == Code.OK, done.stderr
    assert done.stdout.splitlines() == ["pod/left-0 deleted", "pod/left-1 deleted"]
    assert {name for kind, name in kubernetes.names() if kind == "Pod"} == {"web-0"}


def test_python_warns_of_an_absent_controller_in_the_words_of_the_command(
    api: Any, stepper: Stepper, file: Path, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "ANSWER_SECONDS", 0.5)
    with pytest.warns(KdistWarning) as caught:
        handle = load(file).apply()
    (warning,) = caught
    assert f"Warning: {warning.message}\n" in kdist("apply", "job.yaml").stderr
    assert "no controller has acted on it" in str(warning.message)
    assert handle.status().phase == "Pending"


@pytest.mark.filterwarnings("ignore::kdist.errors.KdistWarning")
def test_python_takes_no_old_end_for_that_of_what_it_applies(
    kubernetes: Kubernetes, controller: None, file: Path, kdist: Kdist
) -> None:
    load(file).apply()
    with pytest.warns(KdistWarning, match="`kdist restart digits -n ml`"):  # while it runs
        load(file, "spec.image=r/i:9").apply()
    load(file).apply()
    ended = {"conditions": [{"type": "Complete", "status": "True"}]}
    kubernetes.put("Job", {"metadata": {"name": "digits"}, "status": ended})
    handle = load(file).apply()
    done = handle.wait(timeout=20)
    assert done is not None
    assert done.phase == "Succeeded"
    for kind, name in kubernetes.names():
        if kind == "Pod":
            kubernetes.put(kind, {"metadata": {"name": name}, "status": {"phase": "Succeeded"}})
    edited = load(file, "spec.image=r/i:2")
    for _ in "once", "and again after a command has sent it":
        with pytest.raises(KdistError, match="has already succeeded, with other code"):
            edited.apply()
        waited = kdist("apply", "job.yaml", "--set", "spec.image=r/i:2", "--wait")
        assert waited.exit_code == Code.ERROR
        assert "digits is applied, but has already succeeded" in waited.stderr
    assert not edited.apply(fresh=False).status().phase.terminal
    assert "r/i:2" in json.dumps(kubernetes.find("Job", "digits"))


@pytest.mark.usefixtures("controller")
def test_python_warns_of_a_job_that_stays_suspended_as_the_command_does(
    kubernetes: Kubernetes, file: Path, kdist: Kdist
) -> None:
    load(file).apply().suspend()
    with pytest.warns(KdistWarning) as caught:
        load(file, "spec.nodes.max=2").apply()
    (warning,) = caught
    assert "digits stays suspended: `kdist resume digits -n ml` starts it" in str(warning.message)
    assert f"Warning: {warning.message}\n" in kdist("apply", "job.yaml").stderr
