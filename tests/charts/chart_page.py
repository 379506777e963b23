"""Generates charts/kdist/README.md from the chart's schema and values; a test compares the two.

Run `python -m tests.charts.chart_page`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from tests.charts.rules import CHART

PAGE = CHART / "README.md"

_INTRODUCTION = """# The chart kdist

Installs the controller of TrainingJobs, with their CRD, and what trainings need in a namespace: a
PodMonitor, alerts with [runbooks](../../docs/reference/runbooks.md), two Grafana dashboards, roles
for viewers and editors, network policies and, on request, a quota and queues. Jobs also train
without it.

No registry has the images yet: build both from the [Dockerfile](../../Dockerfile), and name them.

```sh
helm install kdist charts/kdist --namespace kdist-system --create-namespace \\
    --set image.repository=registry.example.com/team/kdist-trainer \\
    --set controller.image.repository=registry.example.com/team/kdist-controller
helm test kdist --namespace kdist-system   # checks permissions, runs a training with two ranks
```

One release runs [the controller](../../docs/how-to/controller.md), for the whole cluster or for
`controller.watchNamespaces`. A release for one team's namespace leaves it out:

```sh
helm install kdist charts/kdist --namespace ml --set controller.enabled=false
```

Such a release needs no cluster-wide permissions unless `rbac.scope` is `cluster`. The CRD stays
when the chart is uninstalled. The chart only creates resources whose CRDs are installed: without
the Prometheus operator there is no PodMonitor, without Kueue no queue. It supports Helm 3 and 4 and
Kubernetes 1.31 or newer.

- **Prometheus of kube-prometheus-stack** only selects objects with the label of its release:
  `--set monitoring.podMonitor.labels.release=STACK --set \
monitoring.prometheusRule.labels.release=STACK`.
- **Without the operator**: the rules are plain files in `rules/`, the dashboards in `dashboards/`.
  [A scrape configuration](../../docs/how-to/monitoring.md#with-a-prometheus-of-your-own) must set
  the labels `job="kdist"` and, from the pod's label `kdist.dev/job`, `kdist_job`; load
  `rules/controller.yaml` only where the controller is scraped as `job="kdist-controller"`.
  `monitoring.scraper.create` creates a ServiceAccount with which a Prometheus may discover the pods
  of this namespace and do nothing else.
- **Without Grafana**: in a checkout, `python -m tools.dashboards preview` draws the dashboards.

| value | default | description |
|---|---|---|
"""


def render() -> str:
    """Text of the page."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    return _INTRODUCTION + "".join(
        f"| `{path}` | `{json.dumps(value)}` | {text} |\n"
        for path, value, text in leaves(schema, values)
    )


def leaves(schema: dict[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every value that can be set, with its default and what it is."""
    for name, part in schema["properties"].items():
        if "properties" in part:
            yield from leaves(part, values[name], f"{path}{name}.")
        else:
            yield f"{path}{name}", values[name], part["description"]


if __name__ == "__main__":
    PAGE.write_text(render())
