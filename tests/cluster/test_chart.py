"""The Helm chart's whole life in a namespace that admits restricted pods only: it comes, is tried,
changes, leaves no trace.
"""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.charts.rules import CHART
from tests.charts.schemas import write_schemas
from tests.cluster.helm import call_helm, render_chart
from tests.cluster.namespace import Namespace

pytestmark = pytest.mark.e2e

# What the cluster itself writes into a namespace as things come and go.
_VOLATILE = {
    "events",
    "events.events.k8s.io",
    "endpoints",
    "endpointslices.discovery.k8s.io",
    "leases.coordination.k8s.io",
}
WHERE_KNOWN = (
    "monitoring.podMonitor.enabled=auto,monitoring.prometheusRule.enabled=auto,kueue.enabled=auto"
)
"""The chart's settings by which it makes what the cluster knows."""


def list_objects(namespace: Namespace) -> set[str]:
    """Everything in the namespace, and the chart's own among what belongs to the whole cluster."""
    kinds = namespace.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    wanted = ",".join(
        kind for kind in kinds if kind not in _VOLATILE and "metrics.k8s.io" not in kind
    )
    inside = namespace.kubectl("get", wanted, "-o", "name", "--ignore-not-found").split()
    mine = f"app.kubernetes.io/instance={namespace.name}"
    around = namespace.kubectl(
        "get", "clusterroles,clusterrolebindings", "-l", mine, "-o", "name"
    ).split()
    return {*inside, *around}


def cluster_roles(namespace: Namespace) -> list[str]:
    """Names of the release's ClusterRoles."""
    mine = f"app.kubernetes.io/instance={namespace.name}"
    return sorted(namespace.kubectl("get", "clusterroles", "-l", mine, "-o", "name").split())


def may(namespace: Namespace, who: str, verb: str, what: str) -> bool:
    """Whether a user who is bound to nothing else may do that in the namespace."""
    line = ["kubectl", "-n", namespace.name, "auth", "can-i", verb, what, f"--as={who}"]
    done = subprocess.run(
        line, env=namespace.environment, capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout.strip() == "yes"


@pytest.mark.needs("helm", "whole-cluster", "shared-volumes")
def test_the_chart_is_installed_tried_changed_taken_back_and_gone_without_a_trace(
    namespace: Namespace,
) -> None:
    before = list_objects(namespace)
    registry, _, tag = namespace.environment["KDIST_IMAGE"].rpartition(":")
    subjects = [
        {"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}
        for name in ("reader", "runner")
    ]
    values = {
        "image": {"repository": registry, "tag": tag},
        "rbac": {"view": subjects[:1], "edit": subjects[1:]},
        "quota": {"hard": {"pods": "20"}},
        "networkPolicy": {"defaultDeny": True},
        "controller": {"enabled": False},
    }
    file = namespace.write(values, "values.yaml")
    chosen = ("--values", str(namespace.home / file))

    reported = call_helm(namespace, "install", str(CHART), *chosen)
    assert "kdist apply job.yaml" in reported
    assert may(namespace, "reader", "list", "pods")
    assert not may(namespace, "reader", "delete", "pods")
    assert may(namespace, "runner", "create", "jobs.batch")
    assert not may(namespace, "runner", "get", "secrets")
    call_helm(namespace, "test", "--timeout", "12m")

    call_helm(namespace, "upgrade", str(CHART), *chosen, "--set", "rbac.scope=cluster")
    assert len(cluster_roles(namespace)) == 2
    assert not may(namespace, "reader", "list", "pods")
    call_helm(namespace, "rollback", "1")
    assert cluster_roles(namespace) == []
    assert may(namespace, "reader", "list", "pods")

    call_helm(namespace, "uninstall", "--wait")
    namespace.until("a namespace as it was", lambda: list_objects(namespace) == before)


@pytest.mark.needs("helm")
def test_kubeconform_finds_every_object_of_every_choice_to_be_what_the_cluster_knows(
    namespace: Namespace,
) -> None:
    schemas = write_schemas(
        json.loads(namespace.kubectl("get", "--raw", "/openapi/v2")), namespace.home / "schemas"
    )
    program = shutil.which("kubeconform", path=namespace.environment["PATH"])
    assert program is not None, "tests/cluster/cluster all builds it"
    known = namespace.kubectl("api-versions").split()
    options = ["--set", WHERE_KNOWN, *(f"--api-versions={each}" for each in known)]
    for values in sorted((CHART / "ci").glob("*-values.yaml")):
        rendered = render_chart(namespace, "-f", str(values), *options)
        line = [program, "-strict", "-summary", "-output", "json", "-schema-location", schemas, "-"]
        done = subprocess.run(
            line, input=rendered, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads(done.stdout)["summary"]
        assert summary["valid"] > 5
        assert summary["skipped"] == 0
        broken = rendered.replace("podSelector:", "podSelecter:")
        done = subprocess.run(
            line, input=broken, capture_output=True, text=True, check=False, timeout=120
        )
        assert "'podSelecter' not allowed" in done.stdout


def test_the_api_server_takes_every_object_that_it_knows(namespace: Namespace) -> None:
    known = [f"--api-versions={each}" for each in namespace.kubectl("api-versions").split()]
    here = f"{WHERE_KNOWN},controller.watchNamespaces={{{namespace.name},default}}"
    for values in sorted((CHART / "ci").glob("*-values.yaml")):
        rendered = render_chart(namespace, "--no-hooks", "-f", str(values), "--set", here, *known)
        line = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-o", "json"]
        printed = namespace.kubectl(*line, "-f", "-", stdin=rendered, anywhere=True)
        assert json.loads(printed)["items"]
