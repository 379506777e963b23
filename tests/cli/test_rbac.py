"""Who may not do all that a command needs does none of it, and hears in one sentence which right is
missing.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from kdist import rbac
from kdist.errors import Code
from tests.cli.cluster.api import Api, Asked, Reply, refusal, write_kubeconfig
from tests.cli.cluster.conftest import Serve, serve
from tests.cli.cluster.objects import Store
from tests.cli.conftest import Kdist
from tools.reference import rights

__all__ = ["serve"]

CORE = "/api/v1/namespaces/ml"
JOB = "/apis/batch/v1/namespaces/ml/jobs/digits"
"""Of the workload: its path, and the uid that the store gives it."""
POD = {
    "metadata": {
        "name": "digits-0",
        "labels": {"kdist.dev/job": "digits", "batch.kubernetes.io/job-name": "digits"},
        "ownerReferences": [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": "digits",
                "uid": JOB,
                "controller": True,
            }
        ],
    },
    "spec": {"containers": [{"name": "trainer"}]},
    "status": {
        "phase": "Running",
        "containerStatuses": [
            {"name": "trainer", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
        ],
    },
}


@pytest.fixture
def store(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """What is in the cluster of the kubeconfig."""
    store = Store()
    write_kubeconfig(tmp_path / "config", serve(store).url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return store


@pytest.fixture
def file(tmp_path: Path, job: str) -> Path:
    document = yaml.safe_load(job)
    document["spec"] |= {
        "image": "registry.example.com/trainer:1",
        "backend": "job",
        "nodes": {"min": 1, "max": 2},
    }
    document["spec"]["checkpoints"] = {"size": "1Gi"}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_new_job_of_which_one_object_may_not_be_made_leaves_no_other(
    store: Store, file: Path, kdist: Kdist
) -> None:
    store.may_not = {"create poddisruptionbudgets", "patch jobs"}
    result = kdist("apply", str(file))
    assert result.exit_code == Code.FORBIDDEN
    reported = (
        "nothing was changed: you are `jane`, who may not create poddisruptionbudgets.policy, "
        "patch jobs.batch in namespace ml"
    )
    assert reported in result.stderr
    held = "create poddisruptionbudgets.policy, patch jobs.batch (in namespace ml)"
    assert (
        "Hint: ask an admin of the cluster for the edit role of kdist's chart, or for a "
        f"role with: {held}"
    ) in result.stderr
    assert "Next: kdist doctor -n ml" in result.stderr
    assert store.objects == {}


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (("scale", "digits", "--nodes", "3"), "patch pods"),
        (("suspend", "digits"), "patch configmaps"),
        (("suspend", "digits"), "patch jobs"),
        (("restart", "digits"), "patch jobs"),
        (("restart", "digits", "--fresh", "--yes"), "create pods"),
        (("restart", "digits", "--fresh", "--yes"), "delete jobs"),
        (("drill", "digits", "--fault", "rank", "--yes"), "patch configmaps"),
        (("drill", "digits", "--fault", "pod", "--yes"), "delete pods"),
        (("recover", "digits"), "patch pods"),
        (("recover", "digits"), "delete pods"),
        (("delete", "digits"), "delete services"),
        (("delete", "digits", "--grace-period", "1"), "delete pods"),
        (("checkpoints", "digits", "-n", "ml"), "create pods"),
    ],
)
def test_a_job_that_is_there_stays_as_it_is_to_the_last_object(
    words: tuple[str, ...], right: str, store: Store, file: Path, kdist: Kdist
) -> None:
    assert kdist("apply", str(file)).exit_code == Code.OK
    if words[0] != "checkpoints":
        store.put(f"{CORE}/pods/digits-0", copy.deepcopy(POD))
    before = copy.deepcopy(store.objects)
    store.may_not = {right}
    result = kdist(*words, "--timeout", "1")
    assert result.exit_code == Code.FORBIDDEN, result.stderr
    assert f"nothing was changed: you are `jane`, who may not {right}" in result.stderr
    assert store.objects == before


def test_a_job_of_another_kind_leaves_nothing_that_whoever_deletes_may_not_even_list(
    store: Store, file: Path, kdist: Kdist, serve: Serve, tmp_path: Path
) -> None:
    kdist("apply", str(file))

    def answer(asked: Asked) -> Reply:
        resource = asked.path.rpartition("/")[2]
        if resource in ("trainingruntimes", "trainjobs", "jobsets", "roles", "rolebindings"):
            return refusal(403, f'User "jane" cannot list resource "{resource}"', "Forbidden")
        return store(asked)

    api: Api = serve(answer)
    write_kubeconfig(tmp_path / "config", api.url)
    result = kdist("delete", "digits", "--purge")
    assert result.exit_code == Code.OK, result.stderr
    assert {path.split("/")[-2] for path in store.objects} <= {"roles", "rolebindings"}


def test_the_role_that_is_advised_is_the_least_that_holds_the_rights() -> None:
    assert "for the view role of kdist's chart" in rbac.advise(
        ["get pods/log", "list jobs.batch"], "ml"
    )
    assert "for the edit role of kdist's chart" in rbac.advise(
        ["get pods/log", "create pods/exec"], "ml"
    )
    assert "chart" not in rbac.advise(["get pods/log", "get secrets"], "ml")
    expected = "ask an admin of the cluster for a ClusterRole with: list pods"
    assert rbac.advise(["list pods"], "") == expected


def test_a_rule_covers_what_it_names_and_no_more() -> None:
    def may(right: rbac.Right, **rule: list[str]) -> bool:
        return rbac._covers(
            {"verbs": ["get"], "apiGroups": [""], "resources": ["pods"], **rule}, right
        )

    right = rbac.Right("get", "v1", "Pod")
    assert may(right)
    assert may(right, verbs=["*"], apiGroups=["*"], resources=["*"])
    assert not may(right, verbs=["list"])
    assert not may(right, resources=["pods/log"])
    assert may(right._replace(subresource="log"), resources=["pods/log"])
    assert not may(right, resourceNames=["a"])
    assert may(right._replace(name="a"), resourceNames=["a"])


def test_the_chart_holds_every_right_of_the_table_and_view_changes_nothing() -> None:
    held = {
        role: [rule for part in rights.PARTS for rule in rights.rules(role, part)]
        for role in ("view", "edit")
    }
    for need in rbac.NEEDS:
        rules = held["view"] + (held["edit"] if need.role == "edit" else [])
        for right in [*need.rights, *rbac.workload_rights(need.workload)]:
            assert any(rbac._covers(rule, right) for rule in rules), right
    changes = [rule for rule in held["view"] if set(rule["verbs"]) - {"get", "list", "watch"}]
    assert changes == []
    assert not any("secrets" in rule["resources"] for rule in held["view"])
    on_secrets = [rule["verbs"] for rule in held["edit"] if "secrets" in rule["resources"]]
    assert on_secrets == [["create"]], "the key of an exchange is made, never read"
