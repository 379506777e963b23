"""A real Prometheus in a namespace, with the chart's rules, its scrapes and an account that may
find pods and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kdist_trainer.rendezvous.handler import pick_port
from tests.charts.monitored import is_ready
from tests.charts.podmonitor import scrape_config
from tests.charts.rules import CHART, shorten
from tests.cluster import discovery
from tests.cluster.helm import call_helm, render_chart
from tests.cluster.namespace import CLUSTER, Namespace
from tools.dashboards.prometheus import Prometheus

SCRAPE_SECONDS = 2
_TARGETS = "/data/targets.json"
_PULLED = "docker.io/prom/prometheus:v3.5.0"  # where the cluster is not ours
_SIGNAL = "import os, sys; os.kill(int(sys.argv[1]), int(sys.argv[2]))"


@contextmanager
def monitoring(namespace: Namespace, *, immediate: bool = False) -> Iterator[Prometheus]:
    """Install the chart and a Prometheus that scrapes as its PodMonitor says.

    `immediate`: alerts wait a sixtieth of their `for`.
    """
    every = f"{SCRAPE_SECONDS}s"
    values = {
        "monitoring": {
            "podMonitor": {"interval": every, "scrapeTimeout": every},
            "scraper": {"create": True},
        },
        "controller": {"enabled": False},
    }
    file = str(namespace.home / namespace.write(values, "values.yaml"))
    call_helm(namespace, "install", str(CHART), "--values", file)
    always = "monitoring.podMonitor.enabled=always,monitoring.prometheusRule.enabled=always"
    rendered = render_chart(namespace, "--no-hooks", "--values", file, "--set", always)
    objects = {each["kind"]: each for each in yaml.safe_load_all(rendered) if each}
    groups: list[dict[str, Any]] = objects["PrometheusRule"]["spec"]["groups"]
    if immediate:
        shorten(groups)
    scrape = scrape_config(objects["PodMonitor"])
    (places,) = scrape.pop("kubernetes_sd_configs")
    scrape["file_sd_configs"] = [{"files": [_TARGETS], "refresh_interval": "1s"}]
    config = {
        "global": {"evaluation_interval": every},
        "rule_files": ["/etc/prometheus/rules.yaml"],
        "scrape_configs": [scrape],
    }
    files = {
        "prometheus.yaml": yaml.safe_dump(config),
        "rules.yaml": yaml.safe_dump({"groups": groups}),
        "discovery.py": Path(discovery.__file__).read_text(),
    }
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "prometheus"},
        "data": files,
    }
    namespace.kubectl("create", "-f", "-", stdin=json.dumps(settings))
    namespace.kubectl(
        "create",
        "-f",
        "-",
        stdin=json.dumps(_pod(namespace, ",".join(places["namespaces"]["names"]))),
    )
    namespace.kubectl("wait", "pod/prometheus", "--for=condition=Ready", "--timeout=120s")
    with forwarded(namespace, "prometheus") as url:
        yield Prometheus(url)


@contextmanager
def forwarded(namespace: Namespace, pod: str) -> Iterator[str]:
    """The address here of the Prometheus in this pod, once it answers."""
    port = pick_port()
    line = ["kubectl", "-n", namespace.name, "port-forward", f"pod/{pod}", f"{port}:9090"]
    process = subprocess.Popen(
        line, env=namespace.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        namespace.until("an answer of Prometheus", lambda: is_ready(url))
        yield url
    finally:
        process.terminate()
        process.wait()


def signal_rank(namespace: Namespace, job: str, number: int = signal.SIGKILL) -> None:
    """Send a signal to the rank of the job's last pod."""
    pod = namespace.pods(job)[-1]["metadata"]["name"]
    started = [
        json.loads(line)
        for line in namespace.kubectl("logs", pod).splitlines()
        if '"worker-started"' in line
    ]
    signal_process(namespace, pod, int(started[-1]["pid"]), number)


def signal_process(namespace: Namespace, pod: str, pid: int, number: int) -> None:
    """Send a signal to a process of a pod."""
    namespace.kubectl("exec", pod, "--", "python", "-c", _SIGNAL, str(pid), str(int(number)))


def _image(namespace: Namespace) -> str:
    if namespace.environment.get("KDIST_E2E") == "kubeconfig":
        return os.environ.get("KDIST_PROMETHEUS_IMAGE", _PULLED)
    return subprocess.run(
        [CLUSTER, "prometheus"], check=True, capture_output=True, text=True
    ).stdout.strip()


_MOUNTS = [
    {"name": "config", "mountPath": "/etc/prometheus"},
    {"name": "data", "mountPath": "/data"},
]
_OF_BOTH_CONTAINERS = {
    "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    },
    "volumeMounts": _MOUNTS,
}


def _pod(namespace: Namespace, watched: str) -> dict[str, Any]:
    prometheus = {
        "name": "prometheus",
        "image": _image(namespace),
        "args": ["--config.file=/etc/prometheus/prometheus.yaml", "--storage.tsdb.path=/data/tsdb"],
        "ports": [{"name": "web", "containerPort": 9090}],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": "web"}, "periodSeconds": 1},
    }
    program = ("python", "/etc/prometheus/discovery.py")
    finder = {
        "name": "discovery",
        "image": namespace.environment["KDIST_IMAGE"],
        "command": ["/usr/bin/tini", "--", *program, watched, _TARGETS],
    }
    user = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec = {
        "serviceAccountName": f"{namespace.name}-kdist-scraper",
        "automountServiceAccountToken": True,
        "terminationGracePeriodSeconds": 1,
        "containers": [{**prometheus, **_OF_BOTH_CONTAINERS}, {**finder, **_OF_BOTH_CONTAINERS}],
        "securityContext": user,
        "volumes": [
            {"name": "config", "configMap": {"name": "prometheus"}},
            {"name": "data", "emptyDir": {}},
        ],
    }
    labels = {"app.kubernetes.io/name": "prometheus"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "prometheus", "labels": labels},
        "spec": spec,
    }
