"""What the installed chart gives, asked of a real API server by impersonation: the controller's
ServiceAccount has the rights of the documented table and no other, in its own namespace, where it
looks after TrainingJobs, and anywhere else; a release for the whole cluster adds to Kubernetes'
roles `view` and `edit` workload kinds and TrainingJobs, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest

from kdist_controller import rbac as controller_rbac
from tests.charts.rules import CHART
from tests.cluster.controller import SELECTOR, installed, remove, write_values
from tests.cluster.helm import call_helm
from tests.cluster.namespace import Namespace
from tests.cluster.test_rights import Held, as_held, held_by, table
from tools.reference import rights

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.needs("helm", "whole-cluster"),
    pytest.mark.timeout(600),
]

JOBS = as_held(rights.to_rules(controller_rbac.JOBS))
NODES = as_held(rights.to_rules(controller_rbac.NODES))
ELECTION = as_held(rights.to_rules(controller_rbac.ELECTION))
NODE_LEASES = as_held(rights.to_rules(controller_rbac.NODE_LEASES))


@pytest.fixture
def place(namespace: Namespace) -> Callable[[str], Namespace]:
    """Another namespace of the cluster, by its name."""

    def make(name: str) -> Namespace:
        return Namespace(name, namespace.home, namespace.environment)

    return make


def account(namespace: Namespace) -> str:
    """The user that the controller's pods are."""
    found = {pod["spec"]["serviceAccountName"] for pod in namespace.find("pods", SELECTOR)}
    (name,) = found
    return f"system:serviceaccount:{namespace.name}:{name}"


def of(place: Namespace, user: str) -> Held:
    """What the account may there that not every ServiceAccount of its namespace may."""
    _, _, home, _ = user.split(":")
    return held_by(place, user) - held_by(place, f"system:serviceaccount:{home}:default")


@pytest.mark.parametrize("watched", ["all", "own"])
def test_the_installed_controllers_account_has_the_rights_of_its_table_and_no_other(
    watched: str,
    namespace: Namespace,
    place: Callable[[str], Namespace],
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [] if watched == "all" else [namespace.name]
    with installed(namespace, watchNamespaces=names):
        user = account(namespace)
        elsewhere = NODES | (JOBS if watched == "all" else set())
        table = {
            namespace.name: JOBS | NODES | ELECTION,
            "kube-node-lease": elsewhere | NODE_LEASES,
            "kube-system": elsewhere,
            "default": elsewhere,
        }
        for name, wanted in table.items():
            found = of(place(name), user)
            with capsys.disabled():
                sys.stdout.write(f"\n{watched}, in {name}: {len(found)} rights of {len(wanted)}")
            assert found == wanted, f"{name}: {found ^ wanted}"


def test_a_release_for_the_cluster_adds_to_view_and_edit_what_kubernetes_roles_lack(
    namespace: Namespace,
) -> None:
    for user, role in (("vera", "view"), ("alice", "edit")):
        namespace.kubectl("create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}")
    namespace.until("the roles are in force", lambda: held_by(namespace, "alice"))
    before = {user: held_by(namespace, user) for user in ("vera", "alice")}
    tables = {"vera": added_by("view"), "alice": added_by("view") | added_by("edit")}
    try:
        options = (*write_values(namespace), "--set", "rbac.scope=cluster")
        call_helm(namespace, "install", str(CHART), *options)
        for user, wanted in tables.items():
            complete = partial(_has, namespace, user, wanted)
            namespace.until(f"{user} has what the table says", complete, 60)
            added = held_by(namespace, user) - before[user]
            assert added
            assert added <= wanted, f"{user}: {added - wanted}"
        assert ("get", "secrets", "") not in held_by(namespace, "vera")
    finally:
        remove(namespace)


def added_by(role: Literal["view", "edit"]) -> Held:
    """What the release adds to a role of Kubernetes: workload kinds and TrainingJobs."""
    return table(role) - as_held(rights.rules(role, "objects"))


def _has(namespace: Namespace, user: str, wanted: Held) -> bool:
    return wanted <= held_by(namespace, user)
