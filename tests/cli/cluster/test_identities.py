"""Identities on a real API server: who may not do all of a command does none of it, and `--as`
means what kubectl means by it.

The server runs alone, without controllers: what is asked and what is changed is seen to the last
object.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kdist import cluster, rbac
from kdist.app import COMMANDS, cli
from kdist.cluster import Impersonation, resources
from kdist.errors import Code
from kdist.manifest import TRAINING_JOB
from tests.cli.cluster import roles
from tests.cli.cluster.api import write_kubeconfig
from tests.cli.cluster.roles import DRY, ROLES, VERBS, Verb
from tests.cli.conftest import JOB, Kdist
from tests.draw import read_commit
from tests.trainer.rendezvous.control_plane import BINARIES, ControlPlane

pytestmark = pytest.mark.e2e  # where the API server is built

NAMESPACE = "ml"
IMAGE = "registry.example.com/trainer:1"
# CI goes through view and edit of the chart or of the cluster, drawn by the commit or by
# KDIST_SEED: each takes a minute.
DRAWN = random.Random(os.environ.get("KDIST_SEED") or read_commit(Path(__file__).parent)).choice(
    (ROLES[:2], ROLES[2:])
)
REVIEW = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
SENTENCE = re.compile(
    r"Error: (nothing was changed: )?you are `[\w-]+`, who may not [\w/. ,]+ in namespace ml\n"
    r"Hint: ask an admin of the cluster for (the (view|edit) role of kdist's chart, or for )?"
    r"a role with: [\w/. ,]+ \(in namespace ml\)\n"
    r"Next: kdist --as [\w-]+ doctor -n ml\n"
)
RBAC = "/apis/rbac.authorization.k8s.io/v1"
KINDS = [("v1", "Pod"), ("batch/v1", "Job"), ("v1", "ConfigMap"), ("v1", "Service")]
KINDS += [("v1", "ServiceAccount"), ("v1", "PersistentVolumeClaim")]
KINDS += [("networking.k8s.io/v1", "NetworkPolicy"), ("policy/v1", "PodDisruptionBudget")]
KINDS += [(rbac.RBAC, "Role"), (rbac.RBAC, "RoleBinding")]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The server, with a user for each role by the role's name."""
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        own = {
            part: plane.request("GET", f"{RBAC}/clusterroles/system:aggregate-to-{part}")["rules"]
            for part in ("view", "edit")
        }
        for role in ROLES:
            place = f"{RBAC}/namespaces/{NAMESPACE}"
            rules = {"metadata": {"name": role}, "rules": roles.rules(role, own)}
            plane.request("POST", f"{place}/roles", rules)
            plane.request("POST", f"{place}/rolebindings", binding(role, "User", "Role", role))
        yield plane


@pytest.fixture
def folder(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two jobs, and the kubeconfig of an admin."""
    for name in ("digits", "other", "suspended"):
        document = yaml.safe_load(JOB)
        document["metadata"]["name"] = name
        document["spec"] |= {"image": IMAGE, "backend": "job", "rendezvous": "c10d"}
        document["spec"] |= {"nodes": {"min": 1, "max": 2}, "checkpoints": {"size": "1Gi"}}
        (tmp_path / ("job.yaml" if name == "digits" else f"{name}.yaml")).write_text(
            yaml.safe_dump(document)
        )
    log_in(plane, tmp_path, {"token": "admin-token"})
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    rendered = CliRunner().invoke(cli, ["render", "other.yaml", "-o", "json"]).stdout
    (tmp_path / "objects.json").write_text(rendered)
    return tmp_path


def place_pod(plane: ControlPlane) -> None:
    """A pod of the job that runs, as far as anybody can see."""
    job = plane.request("GET", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/digits")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "controller": True}
    owner["uid"] = job["metadata"]["uid"]
    labels = {"kdist.dev/job": "digits", "batch.kubernetes.io/job-completion-index": "0"}
    container = {"name": "trainer", "image": IMAGE}
    account = {"serviceAccountName": "digits", "automountServiceAccountToken": False}
    spec = {**account, "containers": [container]}
    metadata = {"name": "p", "labels": labels, "ownerReferences": [owner]}
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    pod = plane.request("POST", pods, {"metadata": metadata, "spec": spec})
    state = {"name": "trainer", "image": "a", "imageID": "a", "ready": True, "restartCount": 0}
    state["state"] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    body = {**pod, "status": {"phase": "Running", "containerStatuses": [state]}}
    plane.request("PUT", f"{pods}/p/status", body)


def objects(admin: cluster.Cluster) -> dict[str, Any]:
    """Every object that a job has, as it is."""
    return {
        f"{kind}/{each['metadata']['name']}": each
        for version, kind in KINDS
        for each in admin.list(version, kind)
    }


def clear(admin: cluster.Cluster) -> None:
    kept = (*ROLES, "team", "digits-rendezvous", "kube-root-ca.crt")
    for title in objects(admin):
        kind, _, name = title.partition("/")
        if name not in kept or kind not in ("Role", "RoleBinding"):
            version = next(version for version, each in KINDS if each == kind)
            admin.send_patch(version, kind, name, {"metadata": {"finalizers": None}})
            admin.send_delete(version, kind, name, grace=0)


def ask_kubectl(role: str, folder: Path) -> dict[str, bool]:
    """Whether kubectl, acting as this user, is allowed each of its command lines of the table."""
    lines = list(dict.fromkeys(line for verb in VERBS for line in verb.kubectl))

    def ask(line: str) -> bool:
        done = kubectl("--as", role, "--cache-dir", str(folder / "cache"), *line.split())
        assert done.returncode == 0 or "rror" in done.stderr, f"{line}: {done.stderr}"
        return f'User "{role}" cannot' not in done.stderr

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(lines, pool.map(ask, lines), strict=True))


def prepare(admin: cluster.Cluster, plane: ControlPlane, verb: Verb, kdist: Kdist) -> None:
    """The job as the command meets it: new, with or without a pod that runs."""
    clear(admin)
    assert kdist("apply", "job.yaml").exit_code == Code.OK
    if verb.suspended:
        assert kdist("apply", "suspended.yaml").exit_code == Code.OK
        assert kdist("suspend", "suspended", "--no-wait").exit_code == Code.OK
    if verb.pods:
        place_pod(plane)


@pytest.mark.parametrize(
    "role",
    [role if role in DRAWN else pytest.param(role, marks=pytest.mark.wide) for role in ROLES],
)
def test_each_command_is_refused_where_kubectl_is_and_then_names_the_right_and_changes_nothing(
    role: str, plane: ControlPlane, folder: Path, kdist: Kdist
) -> None:
    admin = cluster.connect()
    prepare(admin, plane, VERBS[0], kdist)
    may = ask_kubectl(role, folder)
    before: dict[str, Any] = {}
    for index, verb in enumerate(VERBS):
        allowed = (any if verb.either else all)(may[line] for line in verb.kubectl)
        assert allowed == (role in verb.roles), verb
        if allowed and verb.waits:
            continue
        last = VERBS[index - 1]
        if objects(admin) != before or (verb.pods, verb.suspended) != (last.pods, last.suspended):
            prepare(admin, plane, verb, kdist)
            before = objects(admin)
        command, *words = verb.words.split()
        result = kdist(command, "-n", NAMESPACE, "--as", role, "--timeout", "1", *words)
        assert (result.exit_code == Code.FORBIDDEN) == (not allowed), (
            f"{verb.words}: {result.stderr}"
        )
        if not allowed:
            assert SENTENCE.search(result.stderr), f"{verb.words}: {result.stderr}"
            assert objects(admin) == before, verb.words
    clear(admin)


def test_every_command_that_meets_a_cluster_is_in_the_table() -> None:
    known = {name for section in COMMANDS.values() for name in section}
    assert {verb.words.split()[0] for verb in VERBS} == known - roles.ELSEWHERE


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
@pytest.mark.sampled
def test_whoever_acts_as_another_may_do_what_kubectl_says_they_may(
    role: str, plane: ControlPlane, folder: Path
) -> None:
    assert plane.port
    wanted = list(dict.fromkeys([right for need in rbac.NEEDS for right in need.rights]))
    wanted += rbac.workload_rights("get list watch create patch delete")
    items = []
    for each in wanted:
        asked = {"namespace": NAMESPACE, "verb": each.verb, "subresource": each.subresource}
        group, plural = resources.group(each.api_version), resources.plural(each.kind)
        asked |= {"group": group, "resource": plural}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        items.append({**review, "spec": {"resourceAttributes": asked}})
    words = [str(BINARIES / "kubectl"), "--as", role, "create", "-f", "-"]
    words += ["-o", r'jsonpath={.status.allowed}{"\n"}']
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [line == "true" for line in done.stdout.split()]
    ours = cluster.connect(impersonation=Impersonation(role))
    assert ours.whoami() == role
    missing = set(rbac.find_missing(ours, wanted))
    assert [each not in missing for each in wanted] == answers
    if role == "chart-edit":  # without the controller, there are no TrainingJobs
        assert {each.kind for each in missing} <= {TRAINING_JOB[1]}


def test_whom_a_kubeconfig_says_to_act_as_is_who_kubectl_and_kdist_are(
    plane: ControlPlane, folder: Path, kdist: Kdist
) -> None:
    place = f"{RBAC}/namespaces/{NAMESPACE}/rolebindings"
    plane.request("POST", place, binding("team", "Group", "Role", "chart-view"))
    acting = {"as": "anna", "as-groups": ["team"], "as-user-extra": {"project": ["llm", "vision"]}}
    log_in(plane, folder, {"token": "admin-token", **acting})
    theirs = json.loads(kubectl("auth", "whoami", "-o", "json").stdout)["status"]["userInfo"]
    assert cluster.connect().send_create(REVIEW)["status"]["userInfo"] == theirs
    assert (theirs["username"], theirs["extra"]) == ("anna", {"project": ["llm", "vision"]})
    assert "team" in theirs["groups"]
    assert (kubectl("get", "pods").returncode, kdist("get").exit_code) == (0, Code.OK)
    assert "cannot patch" in kubectl("annotate", "role", "chart-view", "a=b", DRY).stderr
    assert kdist("diff", "job.yaml").exit_code == Code.FORBIDDEN

    rule = {"apiGroups": [""], "resources": ["users", "groups"], "verbs": ["impersonate"]}
    plane.request("POST", f"{RBAC}/clusterroles", {"metadata": {"name": "acting"}, "rules": [rule]})
    bound = binding("pod", "User", "ClusterRole", "acting")
    plane.request("POST", f"{RBAC}/clusterrolebindings", bound)
    log_in(plane, folder, {"token": "pod-token", **acting})
    assert 'User "pod" cannot impersonate' in kubectl("get", "pods").stderr
    refused = kdist("get")
    assert refused.exit_code == Code.FORBIDDEN
    assert "Error: you are `pod`, who may not impersonate" in refused.stderr
    del acting["as-user-extra"]
    log_in(plane, folder, {"token": "pod-token", **acting})
    assert (kubectl("get", "pods").returncode, kdist("get").exit_code) == (0, Code.OK)


def binding(name: str, subject: str, kind: str, role: str) -> dict[str, Any]:
    """A binding by the name of whom it binds."""
    group = "rbac.authorization.k8s.io"
    subjects = [{"apiGroup": group, "kind": subject, "name": name}]
    return {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": kind, "name": role},
        "subjects": subjects,
    }


def log_in(plane: ControlPlane, folder: Path, user: dict[str, Any]) -> None:
    """Write the kubeconfig of this user."""
    authority = {"certificate-authority": str(plane.folder / "certificates" / "apiserver.crt")}
    url = f"https://127.0.0.1:{plane.port}"
    write_kubeconfig(folder / "config", url, user=user, cluster=authority)


def kubectl(*words: str) -> subprocess.CompletedProcess[str]:
    """What kubectl says, with the kubeconfig that kdist has too."""
    line = [str(BINARIES / "kubectl"), *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
