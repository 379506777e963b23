"""Three people on a cluster with a controller for all namespaces: alice edits team-a, vera views
it, eve edits team-b. What is outside of team-a can be compared before and after an attempt.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.charts.rules import CHART
from tests.cluster.controller import remove, write_values
from tests.cluster.helm import call_helm
from tests.cluster.namespace import Namespace

ALICE, VERA, EVE = "alice", "vera", "eve"

WATCHED = (
    "pods,jobs.batch,statefulsets,daemonsets,deployments,configmaps,secrets,services,"
    "serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,persistentvolumeclaims"
)
"""Kinds that must not change outside of the namespace of whoever tries something."""

SYSTEM = ("kube-system", "kube-public", "default")

Document = dict[str, Any]
State = dict[tuple[str, str, str], str]


@dataclass(frozen=True)
class Tenants:
    """The namespaces of both teams, and that of the controller.

    Attributes:
        a: alice's and vera's.
        b: eve's.
        system: the controller's.
    """

    a: Namespace
    b: Namespace
    system: Namespace

    def home(self, user: str) -> Namespace:
        """The namespace of a user."""
        return self.b if user == EVE else self.a

    def kubectl(self, user: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """The ended `kubectl ARGS` of a user in her namespace, whatever its code."""
        return self.home(user).type_kubectl(f"--as={user}", *args, stdin=stdin)

    def create(self, user: str, document: Mapping[str, Any]) -> None:
        """Create an object as a user, who may."""
        done = self.kubectl(user, "create", "-f", "-", stdin=json.dumps(document))
        assert done.returncode == 0, done.stderr

    def edit_document(self, name: str, key: str, change: Callable[[Document], object]) -> None:
        """Change a JSON document in the ConfigMap `name` of team-a, as alice may. `change` edits
        it in place, or returns the text to store instead.
        """
        found = self.a.get("configmap", name)
        document = json.loads(found["data"][key])
        text = change(document)
        self.store(name, {key: text if isinstance(text, str) else json.dumps(document)})

    def store(self, name: str, data: Mapping[str, str]) -> None:
        """Write values of alice's ConfigMap `name`, as she may."""
        body = json.dumps({"data": data})
        done = self.kubectl(ALICE, "patch", "configmap", name, "--type=merge", "-p", body)
        assert done.returncode == 0, done.stderr

    def outside(self) -> State:
        """What is in the namespaces that are not team-a: each object by a digest of what users mean
        to change.
        """
        found: State = {}
        for namespace in (*SYSTEM, self.b.name, self.system.name):
            printed = self.a.kubectl("get", WATCHED, "-n", namespace, "-o", "json", anywhere=True)
            for each in json.loads(printed)["items"]:
                key = (namespace, each["kind"], each["metadata"]["name"])
                found[key] = _digest(each)
        return found

    def settle(self, job: str = "digits") -> None:
        """Change what the TrainingJob asks for, and wait until the controller has acted on it."""
        before = self.a.get("trainingjob", job)
        ttl = int(before["spec"].get("ttlSecondsAfterFinished") or 86400) + 1
        body = json.dumps({"spec": {"ttlSecondsAfterFinished": ttl}})
        self.a.kubectl("patch", "trainingjob", job, "--type=merge", "-p", body)

        def acted() -> bool:
            found = self.a.get("trainingjob", job)
            seen = (found.get("status") or {}).get("observedGeneration")
            return bool(seen == found["metadata"]["generation"])

        self.a.until("the controller has acted on the change", acted)

    def settle_refused(self, job: str, kind: str) -> None:
        """Wait until a TrainingJob of team-a is not accepted, because of an object of this kind."""

        def refused() -> bool:
            found = self.condition(job, "Accepted")
            text = f"{found.get('message', '')}".lower()
            return found.get("status") == "False" and kind.lower() in text

        self.a.until(f"{job} is refused because of a {kind}", refused, 60)

    def condition(self, job: str, kind: str) -> Document:
        """A condition of a TrainingJob of team-a; `{}` while it has none of this type."""
        status = self.a.get("trainingjob", job).get("status") or {}
        found = [each for each in status.get("conditions") or () if each["type"] == kind]
        return found[0] if found else {}


def _digest(document: Document) -> str:
    """What of an object only those change who mean to."""
    metadata = document["metadata"]
    kept = {key: metadata.get(key) for key in ("uid", "labels", "annotations", "ownerReferences")}
    rest = {key: value for key, value in document.items() if key not in ("metadata", "status")}
    if document["kind"] == "ConfigMap" and metadata["name"] == "kube-root-ca.crt":
        rest = {}
    if document["kind"] == "Secret":
        rest = {"keys": sorted(document.get("data") or ())}
    return json.dumps({**kept, **rest}, sort_keys=True)


@contextmanager
def settled(a: Namespace, b: Namespace, system: Namespace) -> Iterator[Tenants]:
    """The controller for all namespaces, and the three users with their roles."""
    try:
        options = write_values(system, watchNamespaces=[])
        call_helm(system, "install", str(CHART), *options, "--set", "rbac.scope=cluster")
        b.create()
        for namespace, user, role in ((a, ALICE, "edit"), (a, VERA, "view"), (b, EVE, "edit")):
            namespace.kubectl(
                "create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}"
            )
        tenants = Tenants(a, b, system)
        # the aggregated roles take a moment
        a.until("alice may create TrainingJobs", partial(may, tenants, ALICE, "create"))
        yield tenants
    finally:
        b.kubectl("delete", "namespace", b.name, "--wait=false", "--ignore-not-found")
        remove(system)


def may(tenants: Tenants, user: str, verb: str, resource: str = "trainingjobs") -> bool:
    """Whether a user may do this in her namespace."""
    return tenants.kubectl(user, "auth", "can-i", verb, resource).stdout.strip() == "yes"
