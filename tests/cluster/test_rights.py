"""Who may do what, asked of a real API server by impersonation: the rights of the chart's roles, of
a job's ServiceAccount and of the controller are those of the documented tables, and no other.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdist import rbac
from kdist.rbac import Right
from kdist.spec import API_VERSION, KIND
from kdist_controller import rbac as controller_rbac
from tests.charts.rules import CHART
from tests.cluster.conftest import Job
from tests.cluster.helm import call_helm
from tests.cluster.namespace import Namespace
from tools.reference import rights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.needs("helm")]

# No pod has to run.
UNPLACED: dict[str, Any] = {
    "nodes": 1,
    "rendezvous": "kubernetes",
    "nodeSelector": {"kdist.dev/none": "none"},
}
Held = set[tuple[str, str, str]]


def held_by(namespace: Namespace, user: str) -> Held:
    """What a user may in the namespace: verb, resource with its group, and name, without what
    everybody may.
    """
    everybody = _review(namespace, "kdist-nobody")
    return _review(namespace, user) - everybody


def _review(namespace: Namespace, user: str) -> Held:
    """What `kubectl auth can-i --list` prints, as the API server tells it."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace.name},
    }
    told = namespace.kubectl(
        "create",
        "--validate=false",
        "--as",
        user,
        "-f",
        "-",
        "-o",
        "json",
        stdin=json.dumps(review),
    )
    found: Held = set()
    for rule in json.loads(told)["status"]["resourceRules"]:
        for verb in rule["verbs"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for name in rule.get("resourceNames") or [""]:
                        found.add((verb, f"{resource}.{group}".rstrip("."), name))
    return found


def as_held(rules: list[dict[str, list[str]]]) -> Held:
    return {
        (verb, f"{resource}.{rule['apiGroups'][0]}".rstrip("."), "")
        for rule in rules
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }


def table(role: Any) -> Held:
    """What the table of rights says of a role of the chart."""
    return as_held([rule for part in rights.PARTS for rule in rights.rules(role, part)])


@pytest.fixture
def bound(namespace: Namespace) -> Namespace:
    """The namespace with the roles of a team's release, and the rights of a controller that watches
    it; nothing of the cluster's own is made.
    """
    values = (
        "controller.enabled=false,rbac.scope=namespace,"
        "rbac.view[0].kind=User,rbac.view[0].name=vera,"
        "rbac.edit[0].kind=User,rbac.edit[0].name=alice"
    )
    only = ("--show-only", "templates/rbac.yaml")
    rendered = call_helm(namespace, "template", str(CHART), *only, "--set", values)
    namespace.kubectl("apply", "-f", "-", stdin=rendered)
    role = {
        "apiVersion": rbac.RBAC,
        "kind": "Role",
        "metadata": {"name": "controller"},
        "rules": rights.to_rules(controller_rbac.JOBS),
    }
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    namespace.kubectl("create", "rolebinding", "controller", "--role=controller", "--user=carl")
    namespace.until(
        "the roles are in force",
        lambda: all(held_by(namespace, user) for user in ("vera", "alice", "carl")),
    )
    return namespace


def test_each_account_has_the_rights_of_the_documented_tables_and_no_other(
    bound: Namespace, calm: Job
) -> None:
    assert held_by(bound, "vera") == table("view")
    assert held_by(bound, "alice") == table("view") | table("edit")
    assert held_by(bound, "carl") == as_held(rights.to_rules(controller_rbac.JOBS))

    bound.apply(calm(**UNPLACED), "--as", "alice")
    account = f"system:serviceaccount:{bound.name}:digits"
    meeting = {(verb, "configmaps", "digits-rendezvous") for verb in ("get", "update")}
    bound.until("the pods' role is in force", lambda: held_by(bound, account) >= meeting)
    everybody = held_by(bound, f"system:serviceaccount:{bound.name}:default")
    assert held_by(bound, account) - everybody == meeting
    (secret,) = json.loads(bound.kubectl("get", "secrets", "-o", "json"))["items"]
    assert secret["metadata"]["name"].startswith("digits-exchange-")
    owner = secret["metadata"]["ownerReferences"][0]["kind"]
    assert owner in ("ConfigMap", "TrainingJob"), "as the job has a controller or none"


def test_view_changes_nothing_and_runs_nothing_and_nobody_reads_the_key(
    bound: Namespace, calm: Job
) -> None:
    bound.apply(calm(**UNPLACED), "--as", "alice")
    (secret,) = bound.kubectl("get", "secrets", "-o", "name").split()
    forbidden = {
        "vera": (
            ("create", "pods/portforward"),
            ("create", "pods/exec"),
            ("create", "pods/attach"),
            ("create", "pods/proxy"),
            ("patch", "configmaps"),
            ("update", "configmaps"),
            ("create", "jobs"),
            ("delete", "pods"),
            ("patch", "trainingjobs.kdist.dev"),
            ("create", "secrets"),
        ),
        "alice": (("update", "secrets"), ("patch", "secrets"), ("delete", "secrets")),
    }
    reading = tuple((verb, "secrets") for verb in ("get", "list", "watch"))
    account = f"system:serviceaccount:{bound.name}:digits"
    asked = {**forbidden, account: (("get", "configmaps"), ("create", "pods")), "carl": ()}
    for user, rights_of in asked.items():
        for verb, resource in (*rights_of, *reading):
            told = bound.type_kubectl("auth", "can-i", verb, resource, "--as", user)
            assert told.stdout.strip() == "no", f"{user} may {verb} {resource}"
        refused = bound.type_kubectl("get", secret, "-o", "yaml", "--as", user)
        assert "forbidden" in refused.stderr, user
    read = bound.kubectl("get", "configmaps", "digits-rendezvous", "-o", "json", "--as", "vera")
    key = json.loads(bound.kubectl("get", secret, "-o", "json"))["data"]["key"]
    assert key not in read


def test_deleting_a_job_deletes_its_key(bound: Namespace, calm: Job) -> None:
    bound.apply(calm(**UNPLACED), "--as", "alice")
    assert bound.find("secrets")
    bound.kdist("delete", "digits", "--as", "alice")
    bound.until("the garbage collector has deleted it", lambda: not bound.find("secrets"))


def test_the_tables_name_the_trainings_own_kind() -> None:
    assert Right("list", API_VERSION, KIND) in controller_rbac.JOBS
