"""What the Prometheus operator makes of a PodMonitor: the scrape configuration of a Prometheus
without an operator.

To the letter: tests/cluster/test_monitoring.py compares it with what the operator itself writes.
"""

from __future__ import annotations

import re
from typing import Any

Document = dict[str, Any]


def scrape_config(monitor: Document, endpoint: int = 0) -> Document:
    """Prometheus' `scrape_configs` entry of one endpoint: the operator's own labels first, then
    those of the monitor.
    """
    spec = monitor["spec"]
    name = f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
    chosen = spec["podMetricsEndpoints"][endpoint]
    return {
        "job_name": f"podMonitor/{name}/{endpoint}",
        "honor_labels": False,
        "kubernetes_sd_configs": [
            {"role": "pod", "namespaces": {"names": spec["namespaceSelector"]["matchNames"]}}
        ],
        "scrape_interval": chosen["interval"],
        "scrape_timeout": chosen["scrapeTimeout"],
        "metrics_path": chosen["path"],
        "sample_limit": spec["sampleLimit"],
        "relabel_configs": [
            {"source_labels": ["job"], "target_label": "__tmp_prometheus_job_name"},
            {
                "source_labels": ["__meta_kubernetes_pod_phase"],
                "regex": "(Failed|Succeeded)",
                "action": "drop",
            },
            *(_keep(label, value) for label, value in spec["selector"]["matchLabels"].items()),
            {
                "source_labels": ["__meta_kubernetes_pod_container_port_name"],
                "regex": chosen["port"],
                "action": "keep",
            },
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {
                "source_labels": ["__meta_kubernetes_pod_container_name"],
                "target_label": "container",
            },
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            {"target_label": "job", "replacement": name},
            {"target_label": "endpoint", "replacement": chosen["port"]},
            *map(_snake_case, chosen["relabelings"]),
        ],
        "metric_relabel_configs": [_snake_case(each) for each in chosen["metricRelabelings"]],
    }


def _keep(label: str, value: str) -> Document:
    name = re.sub(r"\W", "_", label)
    sources = [f"__meta_kubernetes_pod_label_{name}", f"__meta_kubernetes_pod_labelpresent_{name}"]
    return {"source_labels": sources, "regex": f"({value});true", "action": "keep"}


def _snake_case(relabeling: Document) -> Document:
    return {
        re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", key): value
        for key, value in relabeling.items()
    }
