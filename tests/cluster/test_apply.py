"""Jobs go to a real API server and leave it: sent once or twice, changed, in conflict, forbidden,
and taken away.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist.errors import Code
from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = pytest.mark.e2e

# No node has this label, so the pods cost nothing while their objects are looked at.
IDLE: dict[str, Any] = {"nodeSelector": {"kdist.dev/none": "such"}}


@pytest.fixture
def file(namespace: Namespace, job: Job) -> Path:
    """A job.yaml whose pods nobody waits for, in the folder where commands are typed."""
    return write(namespace, job(backend="job", **IDLE))


def write(namespace: Namespace, document: dict[str, Any], name: str = "job.yaml") -> Path:
    """The document as a file in the folder of the namespace."""
    path = namespace.home / name
    path.write_text(yaml.safe_dump(document))
    return path


def run_id(namespace: Namespace) -> str:
    """The job's run, as it is noted on its ConfigMap."""
    return str(namespace.get("configmap", "digits")["metadata"]["annotations"]["kdist.dev/run-id"])


def verbs(printed: str) -> set[str]:
    """What was done to the objects."""
    return {line.split()[1] for line in printed.splitlines()}


def test_a_job_that_is_sent_twice_is_unchanged_and_one_that_differs_is_configured(
    namespace: Namespace, file: Path
) -> None:
    assert verbs(namespace.kdist("apply", str(file), "--dry-run=server")) == {"created"}
    assert namespace.get("configmap", "digits") == {}, "a dry run leaves nothing"
    assert verbs(namespace.kdist("apply", str(file))) == {"created"}
    run = run_id(namespace)
    again = namespace.kdist("apply", str(file), "--error-unchanged", code=Code.UNCHANGED)
    assert verbs(again) == {"unchanged"}
    assert namespace.kdist("diff", str(file)) == ""
    shown = namespace.kdist("diff", str(file), "--set", "spec.ttlSecondsAfterFinished=99", code=1)
    assert re.search(r'^\+ .*"ttlSecondsAfterFinished": 99', shown, re.MULTILINE)
    assert "managedFields" not in shown
    changed = namespace.kdist("apply", str(file), "--set", "spec.ttlSecondsAfterFinished=99")
    assert "configmap/digits configured" in changed
    assert "serviceaccount/digits unchanged" in changed
    assert run_id(namespace) == run, "it is the same run"


def test_what_cannot_change_is_refused_whole_with_the_way_out(
    namespace: Namespace, file: Path
) -> None:
    namespace.kdist("apply", str(file))
    before = namespace.get("configmap", "digits")["metadata"]["resourceVersion"]
    edits = ("--set", "spec.resources.memory=2Gi", "--set", "spec.train.epochs=9")
    done = namespace.type_kdist("apply", str(file), *edits)
    assert done.returncode == Code.ERROR
    assert "spec.template: field is immutable" in done.stderr
    assert "`kdist delete` keeps the checkpoints" in done.stderr
    after = namespace.get("configmap", "digits")["metadata"]["resourceVersion"]
    assert after == before, "nothing of it was sent"
    kind = namespace.type_kdist("apply", str(file), "--backend", "statefulset")
    assert kind.returncode == Code.ERROR
    assert "the kind of an existing job cannot be changed" in kind.stderr


def test_a_field_that_another_set_is_a_conflict_with_its_name(
    namespace: Namespace, file: Path
) -> None:
    namespace.kdist("apply", str(file))
    theirs: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job"}
    theirs |= {"metadata": {"name": "digits"}, "spec": {"parallelism": 1}}
    options = ("--server-side", "--force-conflicts", "--field-manager=her-editor")
    namespace.kubectl("apply", *options, "-f", "-", stdin=json.dumps(theirs))
    done = namespace.type_kdist("apply", str(file))
    assert done.returncode == Code.ERROR
    assert "spec.parallelism is set by her-editor" in done.stderr
    assert "job.batch/digits configured" in namespace.kdist("apply", str(file), "--force-conflicts")


def test_our_own_patches_are_no_conflict(namespace: Namespace, file: Path) -> None:
    words = ("apply", str(file), "--set", "spec.nodes={min: 1, max: 3}")
    namespace.kdist(*words)
    patch = json.dumps({"spec": {"parallelism": 2, "completions": 2}})
    ours = ("--field-manager=kdist", "--type=merge")
    namespace.kubectl("patch", "job", "digits", *ours, "-p", patch)
    assert "job.batch/digits configured" in namespace.kdist(*words)
    assert namespace.get("job", "digits")["spec"]["parallelism"] == 3


def test_delete_keeps_the_checkpoints_unless_they_are_purged(
    namespace: Namespace, file: Path
) -> None:
    namespace.kdist("apply", str(file))
    gone = namespace.kdist("delete", "digits").splitlines()
    assert gone[0] == "job.batch/digits deleted", "the workload goes first"
    assert (
        namespace.kubectl(
            "get",
            "pods,jobs,services,networkpolicies,pdb,roles,serviceaccounts",
            "-l",
            "kdist.dev/job",
            "-o",
            "name",
        )
        == ""
    )
    expected = "persistentvolumeclaim/digits-checkpoints\n"
    assert namespace.kubectl("get", "pvc", "-o", "name") == expected
    namespace.kdist("delete", "nope", code=Code.NOT_FOUND)
    namespace.kdist("delete", "nope", "--ignore-not-found")
    expected = "persistentvolumeclaim/digits-checkpoints deleted\n"
    assert namespace.kdist("delete", "-f", str(file), "--purge") == expected


@pytest.mark.sampled
def test_what_a_job_asks_for_no_longer_is_pruned_once_no_pod_needs_it(
    namespace: Namespace, job: Job
) -> None:
    namespace.copy_sources()
    elastic = job(backend="statefulset", nodes={"min": 2, "max": 3}, code="./src", **IDLE)
    file = str(write(namespace, elastic))
    namespace.kdist("apply", file)
    names = namespace.kubectl("get", "configmaps", "-o", "name").split()
    (old,) = [each for each in names if "-code-" in each]
    namespace.until("pods that mount the code", lambda: len(namespace.pods("digits")) == 3)
    (namespace.home / "src" / "calm.py").write_text("")
    assert "pruned" not in namespace.kdist("apply", file), "pods wait that were made with it"
    namespace.kdist("restart", "digits", "--no-wait")
    namespace.until("pods that mount the new code", lambda: len(namespace.pods("digits")) == 3)
    one = ("--set", "spec.nodes=1")
    shown = namespace.kdist("diff", file, *one, code=1)
    assert f"--- live/ConfigMap/{old.rpartition('/')[2]}" in shown
    dry_run = namespace.kdist("apply", file, *one, "--dry-run=server")
    assert f"{old} pruned (server dry run)" in dry_run
    lines = namespace.kdist("apply", file, *one).splitlines()
    pruned = [line.split()[0] for line in lines if line.endswith(" pruned")]
    assert sorted(pruned) == [old, "poddisruptionbudget.policy/digits"]
    assert namespace.get("pvc", "digits-checkpoints")
    namespace.kdist("apply", file, *one, "--error-unchanged", code=Code.UNCHANGED)


def test_jobs_are_picked_by_folder_and_by_label(namespace: Namespace, job: Job) -> None:
    folder = namespace.home / "jobs"
    folder.mkdir()
    for name, team in (("a", "vision"), ("b", "speech")):
        document = job(backend="job", **IDLE)
        document["metadata"] = {"name": name, "labels": {"team": team}}
        write(namespace, document, f"jobs/{name}.yaml")
    namespace.kdist("apply", "jobs")
    assert namespace.kdist("get", "-o", "name") == "job/a\njob/b\n"
    assert namespace.kdist("get", "-l", "team=vision", "-o", "name") == "job/a\n"
    namespace.kdist("delete", "-l", "team=vision", "--no-wait")
    assert namespace.kdist("get", "-o", "name") == "job/b\n"
    header, row = namespace.kdist("get").splitlines()
    assert header.split()[0] == "NAME"
    assert header.split()[-1] == "AGE"
    assert row.startswith("b ")
    namespace.kdist("delete", "--all", "--no-wait")
    assert namespace.kdist("get") == ""


def test_a_namespace_that_is_missing_is_said_with_the_command_that_makes_it(
    namespace: Namespace, file: Path
) -> None:
    done = namespace.type_kdist("apply", str(file), "-n", "kdist-nowhere")
    assert done.returncode == Code.NOT_FOUND
    assert "Next: kubectl create namespace kdist-nowhere" in done.stderr


def as_account(namespace: Namespace, account: str, *verbs_on: str) -> Namespace:
    """The namespace as a service account with these rights in it (`create,patch:configmaps`) meets
    it.
    """
    namespace.kubectl("create", "serviceaccount", account)
    for index, (verb, _, resource) in enumerate(each.partition(":") for each in verbs_on):
        rule = f"--verb={verb} --resource={resource}"
        name = f"{account}-{index}"
        namespace.kubectl("create", "role", name, *rule.split())
        bound = (f"--role={name}", f"--serviceaccount={namespace.name}:{account}")
        namespace.kubectl("create", "rolebinding", name, *bound)
    token = namespace.kubectl("create", "token", account).strip()
    view = ("view", "--raw", "--minify", "--flatten", "-o", "json")
    config = json.loads(namespace.kubectl("config", *view))
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path = namespace.home / f"{account}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    environment = {**namespace.environment, "KUBECONFIG": str(path)}
    return Namespace(namespace.name, namespace.home, environment)


def test_who_may_not_hears_which_verb_on_which_resource_is_missing(
    namespace: Namespace, file: Path
) -> None:
    reader = as_account(namespace, "reader", "get,list:configmaps,pods")
    done = reader.type_kdist("apply", str(file))
    assert done.returncode == Code.FORBIDDEN
    assert f"you are `system:serviceaccount:{namespace.name}:reader`, who may not" in done.stderr
    assert f"Next: kdist doctor -n {namespace.name}" in done.stderr
    checks = json.loads(reader.kdist("doctor", "-o", "json", code=1))
    lacking = {each["name"] for each in checks["checks"] if each["mark"] == "missing"}
    assert {"rights: apply, diff", "rights: delete"} <= lacking


@pytest.mark.needs("jobset")
def test_who_may_not_make_roles_gets_a_job_without_them(namespace: Namespace, file: Path) -> None:
    verbs_all = "get,list,watch,create,patch,delete"
    trainer = as_account(
        namespace,
        "trainer",
        f"{verbs_all}:configmaps,services,serviceaccounts,persistentvolumeclaims,pods,pods/log,events",
        f"{verbs_all}:networkpolicies.networking.k8s.io,poddisruptionbudgets.policy,jobs.batch,jobsets.jobset.x-k8s.io",
    )
    done = trainer.type_kdist("apply", str(file), "--backend", "job")
    assert done.returncode == Code.OK, done.stderr
    assert "rendezvous c10d" in done.stderr
    assert "role." not in done.stdout


@pytest.mark.needs("shared-volumes")
def test_a_healthy_cluster_has_nothing_missing_and_a_missing_namespace_is_found(
    namespace: Namespace,
) -> None:
    checks = json.loads(namespace.kdist("doctor", "-o", "json"))
    marks = {each["name"]: each["mark"] for each in checks["checks"]}
    assert checks["healthy"] is True
    wanted = ("cluster", "you", "namespace", "pods", "nodes", "DNS", "storage")
    assert {marks[name] for name in wanted} == {"ok"}
    nowhere = json.loads(namespace.kdist("doctor", "-n", "kdist-nowhere", "-o", "json", code=1))
    fixes = {each["name"]: each["fix"] for each in nowhere["checks"]}
    assert fixes["namespace"] == "kubectl create namespace kdist-nowhere"


def test_kdist_is_a_plugin_of_kubectl(namespace: Namespace) -> None:
    folder = namespace.home / "bin"
    folder.mkdir()
    for program, function in (
        ("kubectl-kdist", "kdist.__main__:main"),
        ("kubectl_complete-kdist", "kdist.app:complete"),
    ):
        module, _, name = function.partition(":")
        script = folder / program
        script.write_text(f"#!{sys.executable}\nfrom {module} import {name}\n{name}()\n")
        script.chmod(0o755)
    namespace.environment["PATH"] = f"{folder}{os.pathsep}{namespace.environment['PATH']}"

    def kubectl(*args: str) -> str:
        line, env = ["kubectl", *args], namespace.environment
        return subprocess.run(line, env=env, capture_output=True, text=True, check=True).stdout

    assert kubectl("kdist", "get", "--help").startswith("Usage: kubectl kdist get ")
    assert kubectl("kdist", "get", "-n", namespace.name, "-o", "name") == ""
    assert kubectl("__complete", "kdist", "de").splitlines() == ["delete", ":4"]


@pytest.mark.sampled
def test_all_but_what_it_resumes_from_goes_with_a_workload_that_is_deleted_by_hand(
    namespace: Namespace, file: Path
) -> None:
    namespace.kdist("apply", str(file))
    made = objects(namespace)
    run = run_id(namespace)
    namespace.kdist("apply", str(file), "--error-unchanged", code=Code.UNCHANGED)
    stays = {"configmap/digits", "persistentvolumeclaim/digits-checkpoints"}
    namespace.kubectl("delete", "job", "digits")
    namespace.until("the garbage collector to delete the rest", lambda: objects(namespace) == stays)
    found = json.loads(namespace.kdist("why", "digits", "-o", "json"))
    assert "it was rejected or deleted" in found["sentence"]
    for _ in range(2):  # the second time what the first workload owned may be about to go
        namespace.kdist("apply", str(file))
        assert objects(namespace) == made
        namespace.kubectl("delete", "job", "digits")
    namespace.kdist("apply", str(file))
    assert run_id(namespace) == run
    uid = namespace.get("job", "digits")["metadata"]["uid"]
    kinds = "serviceaccount,role,rolebinding,configmap,service,networkpolicy,pdb"
    owned = [each["metadata"] for each in namespace.find(kinds, "kdist.dev/job=digits")]
    assert {each["name"] for each in owned if "ownerReferences" not in each} == {"digits"}
    assert {one["uid"] for each in owned for one in each.get("ownerReferences", [])} == {uid}


def objects(namespace: Namespace) -> set[str]:
    """What there is of the job, but for its pods."""
    kinds = "serviceaccount,role,rolebinding,pvc,configmap,service,networkpolicy,pdb,job"
    names = namespace.kubectl("get", kinds, "-l", "kdist.dev/job=digits", "-o", "name").split()
    return set(names)
