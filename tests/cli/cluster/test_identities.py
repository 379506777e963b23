"""Identities on a real API server: who may not do all of a command does none of it, and `--as` means what kubectl means by it.

The server runs alone, without controllers: what is asked and what is changed is seen to the last object.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist import cluster, rights
from kdist.cluster import Impersonation, resources
from kdist.errors import Code
from tests.cli.cluster.api import write_kubeconfig
from tests.cli.conftest import JOB, Kdist
from tests.trainer.rendezvous.control_plane import BINARIES, ControlPlane

pytestmark = pytest.mark.e2e  # where the API server is built

NAMESPACE = "ml"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ROLES = ("chart-view", "chart-edit", "builtin-view", "builtin-edit")
KINDS = [("v1", "Pod"), ("batch/v1", "Job"), ("v1", "ConfigMap"), ("v1", "Service"), ("v1", "ServiceAccount")]
KINDS += [("v1", "PersistentVolumeClaim"), ("networking.k8s.io/v1", "NetworkPolicy"), ("policy/v1", "PodDisruptionBudget")]
KINDS += [(rights.RBAC, "Role"), (rights.RBAC, "RoleBinding")]

EDIT = {"chart-edit", "builtin-edit"}
# Each command, and who may: all others are refused, and change nothing. None: who may is not tried, for nobody would answer.
VERBS: dict[str, tuple[tuple[str, ...], set[str] | None]] = {
    "get": (("get",), set(ROLES)),
    "status": (("status", "digits"), set(ROLES)),
    "why": (("why", "digits"), set(ROLES)),
    "events": (("events", "digits"), set(ROLES)),
    "diff": (("diff", "job.yaml", "--set", "spec.nodes.max=3"), EDIT),
    "apply": (("apply", "job.yaml", "--set", "spec.nodes.max=3"), EDIT),
    "apply a new job": (("apply", "other.yaml"), EDIT),
    "scale": (("scale", "digits", "--nodes", "3", "--no-wait"), EDIT),
    "suspend": (("suspend", "digits", "--no-wait"), EDIT),
    "stop": (("stop", "digits", "--no-wait"), EDIT),
    "delete": (("delete", "digits", "--purge", "--no-wait"), EDIT),
    "restart": (("restart", "digits", "--no-wait"), EDIT),
    "restart --fresh": (("restart", "digits", "--fresh", "--yes", "--no-wait"), None),
    "checkpoints": (("checkpoints", "digits", "-n", NAMESPACE), None),
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The server, with a user for each role by the role's name."""
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        for role in ROLES:
            name, subject = {"metadata": {"name": role}}, {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": role}
            ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role}
            place = f"{RBAC}/namespaces/{NAMESPACE}"
            plane.request("POST", f"{place}/roles", {**name, "rules": rules_of(plane, role)})
            plane.request("POST", f"{place}/rolebindings", {**name, "roleRef": ref, "subjects": [subject]})
        yield plane


def rules_of(plane: ControlPlane, role: str) -> list[dict[str, Any]]:
    """The rules of a role. Kubernetes' own are put together by a controller, which is not here."""
    origin, _, who = role.partition("-")
    parts = ["view", "edit"] if who == "edit" else ["view"]
    if origin == "chart":
        return [rule for part in parts for many in (False, True) for rule in rights.rules(part, workloads=many)]  # type: ignore[arg-type]  # they are view and edit
    own = [plane.request("GET", f"{RBAC}/clusterroles/system:aggregate-to-{part}") for part in parts]
    return [rule for each in own for rule in each["rules"]]


@pytest.fixture
def folder(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two jobs, and the kubeconfig of an admin."""
    for name in ("digits", "other"):
        document = yaml.safe_load(JOB)
        document["metadata"]["name"] = name
        document["spec"] |= {"image": "registry.example.com/trainer:1", "backend": "job", "rendezvous": "c10d"}
        document["spec"] |= {"nodes": {"min": 1, "max": 2}, "checkpoints": {"size": "1Gi"}}
        (tmp_path / ("job.yaml" if name == "digits" else f"{name}.yaml")).write_text(yaml.safe_dump(document))
    authority = {"certificate-authority": str(plane.folder / "certificates" / "apiserver.crt")}
    write_kubeconfig(tmp_path / "config", f"https://127.0.0.1:{plane.port}", user={"token": "admin-token"}, cluster=authority)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def place_pod(plane: ControlPlane) -> None:
    """A pod of the job that runs, as far as anybody can see."""
    job = plane.request("GET", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/digits")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "uid": job["metadata"]["uid"]}
    labels = {"kdist.dev/job": "digits", "batch.kubernetes.io/job-completion-index": "0"}
    container = {"name": "trainer", "image": "registry.example.com/trainer:1"}
    spec = {"serviceAccountName": "digits", "automountServiceAccountToken": False, "containers": [container]}
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    pod = plane.request("POST", pods, {"metadata": {"name": "p", "labels": labels, "ownerReferences": [owner]}, "spec": spec})
    state = {"name": "trainer", "image": "a", "imageID": "a", "ready": True, "restartCount": 0}
    state["state"] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    body = {**pod, "status": {"phase": "Running", "containerStatuses": [state]}}
    plane.request("PUT", f"{pods}/p/status", body)


def objects(admin: cluster.Cluster) -> dict[str, Any]:
    """Every object that a job has, as it is."""
    return {f"{kind}/{each['metadata']['name']}": each for version, kind in KINDS for each in admin.list(version, kind)}


def clear(admin: cluster.Cluster) -> None:
    for title in objects(admin):
        kind, _, name = title.partition("/")
        if name not in (*ROLES, "digits-rendezvous", "kube-root-ca.crt") or kind not in ("Role", "RoleBinding"):
            version = next(version for version, each in KINDS if each == kind)
            admin.patch(version, kind, name, {"metadata": {"finalizers": None}})
            admin.delete(version, kind, name, grace=0)


@pytest.mark.parametrize("role", ROLES)
def test_each_command_works_or_changes_nothing_and_says_which_right_is_missing(
    role: str, plane: ControlPlane, folder: Path, kdist: Kdist
) -> None:
    admin = cluster.connect()
    for verb, (words, allowed) in VERBS.items():
        if allowed is None and role in EDIT:
            continue
        clear(admin)
        assert kdist("apply", "job.yaml").exit_code == Code.OK
        if verb not in ("scale", "delete", "restart"):
            place_pod(plane)
        before = objects(admin)
        result = kdist(words[0], "--as", role, "--timeout", "3", *words[1:])
        if allowed is not None and role in allowed:
            assert result.exit_code in ((0, 1) if verb == "diff" else (0,)), f"{verb}: {result.stderr}"
            continue
        assert result.exit_code == Code.FORBIDDEN, f"{verb}: {result.stderr}"
        assert f"you are `{role}`, who may not" in result.stderr, verb
        assert objects(admin) == before, verb
    clear(admin)


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
def test_whoever_acts_as_another_may_do_what_kubectl_says_they_may(role: str, plane: ControlPlane, folder: Path) -> None:
    assert plane.port
    wanted = list(dict.fromkeys([right for need in rights.NEEDS for right in need.rights]))
    wanted += rights.workload_rights("get list watch create patch delete")
    items = []
    for each in wanted:
        asked = {"namespace": NAMESPACE, "verb": each.verb, "group": resources.group(each.api_version)}
        asked |= {"resource": resources.plural(each.kind), "subresource": each.subresource}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        items.append({**review, "spec": {"resourceAttributes": asked}})
    words = [str(BINARIES / "kubectl"), "--as", role, "create", "-f", "-", "-o", r'jsonpath={.status.allowed}{"\n"}']
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [line == "true" for line in done.stdout.split()]
    ours = cluster.connect(impersonation=Impersonation(role))
    assert ours.whoami() == role
    missing = set(rights.find_missing(ours, wanted))
    assert [each not in missing for each in wanted] == answers
    if role == "chart-edit":
        assert not missing
