"""Makes charts/kdist/README.md of the chart's schema and values: `python -m
tests.charts.chart_page`; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from tests.charts.rules import CHART

PAGE = CHART / "README.md"

_INTRODUCTION = """# The chart kdist

What trainings need around them in a namespace: a PodMonitor, alerts with \
[runbooks](../../docs/runbooks.md), two Grafana
dashboards, roles for people who look and people who run, network policies, and, where asked for, \
a quota and queues. No server of
kdist's runs: a job needs none of it to train.

```sh
helm install kdist charts/kdist --namespace ml
helm test kdist --namespace ml          # the rights of the trainings' account, and a training of \
two ranks
```

It takes no rights of the whole cluster unless `rbac.scope` is `cluster`, and makes nothing that a \
cluster does not know: without
the Prometheus operator there is no PodMonitor, without Kueue no queue. Helm 3 and 4; Kubernetes \
1.31 or newer.

- **Prometheus of kube-prometheus-stack** takes only what carries its release's label:
  `--set monitoring.podMonitor.labels.release=STACK --set \
monitoring.prometheusRule.labels.release=STACK`.
- **Without the operator**: the rules are plain files in `rules/`, the dashboards in \
`dashboards/`; a scrape has to set the labels
  `job="kdist"` and, from the pod's label `kdist.dev/job`, `kdist_job`. With \
`monitoring.scraper.create` there is a ServiceAccount
  with which a Prometheus may find this namespace's pods, and nothing else.
- **Without Grafana**: `kdist dashboards preview --prometheus URL` draws the same dashboards.

| value | default | what it is |
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
