"""The real Prometheus operator in a namespace of its own, and the Prometheus that it makes from
what the chart brings.

It gets the rights that its own manifests ask for, in that namespace alone. Its kinds belong to the
whole cluster: those that were not there go again.
"""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.rules import CHART
from tests.cluster.helm import call_helm
from tests.cluster.monitoring import SCRAPE_SECONDS, forwarded
from tests.cluster.namespace import CLUSTER, Namespace
from tools.dashboards.prometheus import Prometheus

# of the Prometheus, and the label by which it takes monitors and rules, as kube-prometheus-stack's
# does
NAME = "fleet"
POD = f"prometheus-{NAME}-0"
_KINDS = ("podmonitors", "probes", "prometheuses", "prometheusrules", "servicemonitors")
_USER = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "fsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_SHARING = {"__tmp_hash", "__tmp_current_shard"}
_SECONDS = 1200.0  # in which the programs were built again, where their versions changed


@contextmanager
def operated(namespace: Namespace) -> Iterator[Prometheus]:
    """Install the operator, the chart with the label `node`, and a Prometheus of the operator's;
    skips where none was built.
    """
    if not shutil.which("prometheus-kubernetes", path=namespace.environment["PATH"]):
        pytest.skip(
            "the Prometheus operator is not built: `tests/cluster/cluster monitoring` "
            "builds it in some minutes"
        )
    known = _programs()
    manifests = Path(known["manifests"])
    with _kinds(namespace, manifests / "prometheus-operator-crd"):
        _install(namespace, manifests / "rbac" / "prometheus-operator", known)
        every = f"{SCRAPE_SECONDS}s"
        chosen = {"labels": {"release": NAME}}
        pods = {
            "podMonitor": {"interval": every, "scrapeTimeout": every, "nodeLabel": True, **chosen},
            "prometheusRule": chosen,
        }
        values = {
            "monitoring": {**pods, "scraper": {"create": True}},
            "controller": {"enabled": False},
        }
        file = namespace.write(values, "values.yaml")
        call_helm(namespace, "install", str(CHART), "--values", str(namespace.home / file))
        namespace.kubectl(
            "create", "-f", "-", stdin=json.dumps(_prometheus(namespace, known, every))
        )
        try:
            namespace.until(
                "the operator's Prometheus", lambda: _is_ready(namespace.get("pod", POD))
            )
            with forwarded(namespace, POD) as url:
                yield Prometheus(url)
        finally:
            namespace.kubectl("delete", "prometheus", NAME, "--wait=false")


def made_scrapes(namespace: Namespace) -> list[dict[str, Any]]:
    """The scrape configurations that the operator wrote, less how several Prometheuses would share
    the targets.
    """
    packed = base64.b64decode(
        namespace.get("secret", f"prometheus-{NAME}")["data"]["prometheus.yaml.gz"]
    )
    scrapes: list[dict[str, Any]] = yaml.safe_load(gzip.decompress(packed))["scrape_configs"]
    for each in scrapes:
        each["relabel_configs"] = [
            one
            for one in each["relabel_configs"]
            if not _SHARING & {one.get("target_label"), *one.get("source_labels", [])}
        ]
    return scrapes


def _programs() -> dict[str, str]:
    """Images, the version of Prometheus, and where the operator's manifests lie, by name."""
    done = subprocess.run(
        [CLUSTER, "monitoring"], capture_output=True, text=True, check=False, timeout=_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@contextmanager
def _kinds(namespace: Namespace, folder: Path) -> Iterator[None]:
    names = {
        f"{kind}.monitoring.coreos.com": folder / f"monitoring.coreos.com_{kind}.yaml"
        for kind in _KINDS
    }
    there = namespace.kubectl(
        "get", "crd", "-o", "custom-columns=N:.metadata.name", "--no-headers"
    ).split()
    ours = [name for name in names if name not in there]
    try:
        for name in ours:
            namespace.kubectl("create", "-f", str(names[name]))
        namespace.kubectl(
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            *(f"crd/{name}" for name in names),
        )
        yield
    finally:
        if ours:
            namespace.kubectl("delete", "crd", "--ignore-not-found", *ours)


def _install(namespace: Namespace, folder: Path, known: dict[str, str]) -> None:
    """The operator as its manifests have it; what they give it in the whole cluster it gets in this
    namespace.
    """
    role, binding, account, deployment = (
        yaml.safe_load((folder / f"prometheus-operator-{name}.yaml").read_text())
        for name in ("cluster-role", "cluster-role-binding", "service-account", "deployment")
    )
    role["kind"], binding["kind"], binding["roleRef"]["kind"] = "Role", "RoleBinding", "Role"
    binding["subjects"][0]["namespace"] = namespace.name
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["image"] = known["prometheus-operator"]
    container["args"] = [
        f"--namespaces={namespace.name}",
        f"--prometheus-config-reloader={known['prometheus-config-reloader']}",
        "--config-reloader-cpu-limit=0",
    ]
    container["resources"]["limits"].pop("cpu")  # a loaded machine is slow enough
    for document in (role, binding, account, deployment):
        document["metadata"]["namespace"] = namespace.name
        namespace.kubectl("create", "-f", "-", stdin=json.dumps(document))
    namespace.kubectl("rollout", "status", "deployment/prometheus-operator", "--timeout=120s")


def _prometheus(namespace: Namespace, known: dict[str, str], every: str) -> dict[str, Any]:
    ours = {"matchLabels": {"release": NAME}}
    spec = {
        "image": known["prometheus-kubernetes"],
        "version": known["version"],
        "replicas": 1,
        "serviceAccountName": f"{namespace.name}-kdist-scraper",
        "podMonitorSelector": ours,
        "ruleSelector": ours,
        "evaluationInterval": every,
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": _USER,
        "terminationGracePeriodSeconds": 1,
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": NAME},
        "spec": spec,
    }


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
