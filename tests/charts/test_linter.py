"""kube-linter itself has nothing to say of what the chart and kdist render, beyond exemptions with
reasons; it sees breaks.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist import backends
from kdist.job_file import load_file
from tests.charts import objects
from tests.charts.rules import CHART
from tests.charts.test_templates import OPERATOR, VALUES, find_program, helm
from tests.manifests.jobs import EXAMPLES, FULL, IMAGE, load, place

__all__ = ["helm"]

pytestmark = pytest.mark.e2e  # where kube-linter and Helm are built
CONFIG = Path(__file__).with_name("kube-linter.yaml")
KNOWN = {"Job", "StatefulSet", "Pod"}  # kinds with pods that kube-linter looks into
PLACED = [f"spec.image={IMAGE}", "metadata.namespace=ml"]
Found = dict[str, set[str]]
Document = dict[str, Any]


def write_objects(folder: Path, documents: list[Document]) -> None:
    """One folder is one namespace to kube-linter; templates of pods in kinds that it does not know
    become pods.
    """
    folder.mkdir(parents=True)
    strange = [each for each in documents if each["kind"] not in KNOWN]
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "labels": {},
                **template.get("metadata", {}),
                "name": f"template-{number}",
                "namespace": "ml",
            },
            "spec": template["spec"],
        }
        for number, (_, template) in enumerate(objects.templates(strange))
    ]
    (folder / "objects.yaml").write_text(yaml.safe_dump_all([*documents, *pods], sort_keys=False))


def write_jobs(folder: Path) -> None:
    for name in (*EXAMPLES, "full"):
        job = load(FULL) if name == "full" else load_file(EXAMPLES[name], overrides=PLACED)
        for backend in backends.NAMES:
            write_objects(
                folder / f"{name}-{backend}", [each.document for each in place(job, backend)]
            )


def render_chart(helm: str, values: Path) -> list[Document]:
    options = ["--namespace", "ml", "--kube-version", "1.36.0", *OPERATOR, "-f", str(values)]
    line = [helm, "template", "kdist", str(CHART), *options]
    printed = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120).stdout
    return [each for each in yaml.safe_load_all(printed) if each]


def write_chart(folder: Path, helm: str) -> None:
    for values in VALUES:
        write_objects(folder / values.stem, render_chart(helm, values))


def lint(folder: Path, *options: str) -> Found:
    """What each check says of which object; without options, all checks that are not exempt."""
    line = [
        find_program("kube-linter"),
        "lint",
        "--format",
        "json",
        *(options or ("--config", str(CONFIG))),
        str(folder),
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    found: Found = {}
    for each in json.loads(done.stdout)["Reports"] or []:
        kind = each["Object"]["K8sObject"]["GroupVersionKind"]["Kind"]
        place = Path(each["Object"]["Metadata"]["FilePath"]).parent.name
        found.setdefault(each["Check"], set()).add(
            f"{place} {kind}: {each['Diagnostic']['Message']}"
        )
    assert done.returncode == (1 if found else 0), done.stderr
    return found


def test_kube_linter_has_nothing_to_say_of_the_jobs_of_any_kind(tmp_path: Path) -> None:
    write_jobs(tmp_path)
    assert lint(tmp_path) == {}


def test_kube_linter_has_nothing_to_say_of_the_chart(tmp_path: Path, helm: str) -> None:
    write_chart(tmp_path, helm)
    assert lint(tmp_path) == {}


def test_every_exemption_is_needed(tmp_path: Path) -> None:
    write_jobs(tmp_path / "jobs")
    write_chart(tmp_path / "chart", find_program("helm"))
    exempt = set(yaml.safe_load(CONFIG.read_text())["checks"]["exclude"]) - {"schema-validation"}
    assert (
        exempt
        - set(lint(tmp_path, "--do-not-auto-add-defaults", "--include", ",".join(sorted(exempt))))
        == set()
    )


BREAKS: dict[str, Callable[[Document], Any]] = {
    "privileged-container": lambda pod: pod["containers"][0]["securityContext"].update(
        privileged=True
    ),
    "run-as-non-root": lambda pod: pod["containers"][0]["securityContext"].update(
        runAsUser=0, runAsNonRoot=False
    ),
    "latest-tag": lambda pod: pod["containers"][0].update(
        image="registry.example.com/trainer:latest"
    ),
    "unset-memory-requirements": lambda pod: pod["containers"][0].pop("resources"),
    "host-network": lambda pod: pod.update(hostNetwork=True),
    "default-service-account": lambda pod: pod.update(
        serviceAccountName="default", automountServiceAccountToken=True
    ),
}


@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.sampled
def test_kube_linter_notices_what_breaks_a_job_of_any_kind(tmp_path: Path, backend: str) -> None:
    for check, change in BREAKS.items():
        documents = [each.document for each in place(load(FULL), backend)]
        ((_, template),) = objects.templates(documents)
        change(template["spec"])
        write_objects(tmp_path / check, documents)
    found = lint(tmp_path)
    assert {
        check
        for check in BREAKS
        if not any(each.startswith(f"{check} ") for each in found.get(check, ()))
    } == set()


def test_kube_linter_notices_what_breaks_the_chart(tmp_path: Path) -> None:
    documents = render_chart(find_program("helm"), CHART / "ci/everything-values.yaml")
    known = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    BREAKS["privileged-container"](known["Pod", "kdist-test-rights"]["spec"])
    known["Role", "kdist-view"]["rules"][0]["resources"].append("secrets")
    known["Role", "kdist-scraper"]["rules"][0]["verbs"] = ["*"]
    write_objects(tmp_path / "broken", documents)
    assert {"privileged-container", "access-to-secrets", "wildcard-in-rules"} <= set(lint(tmp_path))
