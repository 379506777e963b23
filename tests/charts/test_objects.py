"""What the chart and kdist render keeps kube-linter's checks, and each check notices what breaks
it.
"""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist import backends
from tests.charts import objects
from tests.charts.objects import CHECKS, Check
from tests.charts.rules import CHART
from tests.charts.test_templates import OPERATOR, VALUES, helm
from tests.manifests.jobs import EXAMPLES, FULL, example, load, place

__all__ = ["helm"]

JOBS = (*EXAMPLES, "full")
Break = Callable[[dict[str, dict[str, Any]], dict[str, Any]], None]


def rendered(name: str, backend: str) -> list[dict[str, Any]]:
    job = load(FULL) if name == "full" else example(EXAMPLES[name])
    return [copy.deepcopy(each.document) for each in place(job, backend)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.sampled
def test_every_object_of_a_job_keeps_the_check(backend: str, check: Check) -> None:
    assert {name: found for name in JOBS if (found := list(check(rendered(name, backend))))} == {}


@pytest.mark.e2e  # where Helm is built
@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_every_object_of_the_chart_keeps_the_checks(helm: str, values: Path) -> None:
    line = [
        helm,
        "template",
        "kdist",
        str(CHART),
        "--namespace",
        "ml",
        "--kube-version",
        "1.36.0",
        "-f",
        str(values),
        *OPERATOR,
    ]
    printed = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120).stdout
    documents = [each for each in yaml.safe_load_all(printed) if each]
    assert {check.__name__: found for check in CHECKS if (found := list(check(documents)))} == {}


def set_container(**fields: Any) -> Break:
    return lambda _, container: container.update(fields)


BROKEN: dict[Check, Break] = {
    objects.latest_tag: set_container(image="registry:5000/trainer"),
    objects.run_as_non_root: lambda _, container: container["securityContext"].update(
        runAsNonRoot=False
    ),
    objects.no_read_only_root_fs: lambda _, container: container["securityContext"].pop(
        "readOnlyRootFilesystem"
    ),
    objects.privilege_escalation_container: lambda _, container: container["securityContext"].pop(
        "capabilities"
    ),
    objects.unset_requirements: set_container(resources={"requests": {"cpu": 1, "memory": "1Gi"}}),
    objects.host_namespaces: lambda known, _: known["pod"].update(hostNetwork=True),
    objects.env_var_secret: set_container(env=[{"name": "API_KEY", "value": "x"}]),
    objects.non_existent_ports: set_container(ports=[]),
    objects.dangling_selectors: lambda known, _: known["Service"]["spec"]["selector"].update(
        {"kdist.dev/job": "other"}
    ),
    objects.wildcard_in_rules: lambda known, _: known["Role"]["rules"][0].update(verbs=["*"]),
    objects.job_ttl_seconds_after_finished: lambda known, _: known["Job"]["spec"].pop(
        "ttlSecondsAfterFinished"
    ),
    objects.deprecated_service_account_field: lambda known, _: known["pod"].pop(
        "automountServiceAccountToken"
    ),
    objects.no_extensions_v1beta: lambda known, _: known["Job"].update(apiVersion="batch/v1beta1"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_notices_what_breaks_it(check: Check) -> None:
    documents = rendered("full", "job")
    ((_, template),) = objects.templates(documents)
    BROKEN[check](
        {each["kind"]: each for each in documents} | {"pod": template["spec"]},
        template["spec"]["containers"][0],
    )
    assert list(check(documents)) != []
