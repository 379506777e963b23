"""What is somebody else's, and what a ConfigMap says, decides nothing: a job's names that are taken
are named before anything is sent, with a way out that works, and commands read the TrainingJob.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import yaml

from kdist.backends import DEPENDENT_KINDS
from kdist.errors import Code
from tests.cli.conftest import Kdist, kdist
from tests.controller.conftest import Stepper
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_commands import JOB, controller, file

__all__ = ["controller", "file", "kdist"]

TAKEN = [kind for _, kind in DEPENDENT_KINDS if kind not in ("TrainingRuntime", "Secret")]


def run(kubernetes: Kubernetes, command: str) -> None:
    """Do what a command line of kubectl does."""
    words = command.split()
    assert words[-2:] == ["-n", "ml"], command
    kind = next(each for each in [*TAKEN, "Job"] if each.lower() == words[2].partition(".")[0])
    if words[1] == "delete":
        kubernetes.remove(kind, words[3])
        return
    assert words[1] == "annotate"
    assert "--overwrite" in words, "an annotation that exists is refused without"
    key, _, value = words[4].partition("=")
    kubernetes.put(kind, {"metadata": {"name": words[3], "annotations": {key: value}}})


@pytest.mark.usefixtures("controller")
@pytest.mark.parametrize("kind", [*TAKEN, "Job"])
def test_apply_names_what_has_the_jobs_names_and_a_way_out_that_works(
    kubernetes: Kubernetes, file: Any, kdist: Kdist, kind: str
) -> None:
    name = "digits-checkpoints" if kind == "PersistentVolumeClaim" else "digits"
    mark = {"kdist.dev/owner": "a copy of another"}
    kubernetes.put(kind, {"metadata": {"name": name, "annotations": mark}})
    before = copy.deepcopy(kubernetes.objects)
    refused = kdist("apply", "job.yaml")
    assert refused.exit_code != Code.OK
    assert f"{kind.lower()}" in refused.stderr.partition("/")[0]
    assert f"/{name} in namespace ml" in refused.stderr
    assert kubernetes.objects == before, "nothing was sent"
    again = ["apply", "job.yaml"]
    if found := re.search(r"`(kubectl [^`]+)`", refused.stderr):
        run(kubernetes, found[1])
    else:
        (claim,) = re.findall(r"`checkpoints: ({claim: [^}]+})`", refused.stderr)
        again += ["--set", f"spec.checkpoints={claim}"]
    sent = kdist(*again)
    assert sent.exit_code == Code.OK, sent.stderr
    assert kubernetes.find("Job", "digits") is not None


def test_an_object_that_somebody_makes_later_is_named_when_the_job_is_applied_again(
    kubernetes: Kubernetes, stepper: Stepper, file: Any, kdist: Kdist
) -> None:
    kubernetes.put("TrainingJob", yaml.safe_load(file.read_text()))
    stepper.settle()
    kubernetes.remove("ServiceAccount", "digits")
    mark = {"kdist.dev/owner": "digits/serviceaccount/digits"}
    kubernetes.put("ServiceAccount", {"metadata": {"name": "digits", "annotations": mark}})
    again = ("apply", "job.yaml", "--dry-run=server")
    refused = kdist(*again)
    assert refused.exit_code != Code.OK
    assert "it was made for a job digits, but not for this TrainingJob" in refused.stderr
    (command,) = re.findall(r"`(kubectl delete [^`]+)`", refused.stderr)
    run(kubernetes, command)
    sent = kdist(*again)
    assert sent.exit_code == Code.OK, sent.stderr


def tamper(kubernetes: Kubernetes) -> None:
    """Change the job's ConfigMap as somebody may who may edit ConfigMaps."""
    found = kubernetes.find("ConfigMap", "digits")
    assert found is not None
    document = json.loads(found["data"]["job.json"])
    document["metadata"] |= {"namespace": "kube-system", "name": "evil"}
    document["spec"] |= {"image": "evil:1", "serviceAccountName": "evil", "checkpoints": None}
    data = {"job.json": json.dumps(document)}
    kubernetes.put("ConfigMap", {"metadata": {"name": "digits"}, "data": data})


@pytest.mark.sampled
@pytest.mark.parametrize(
    "command",
    [
        "suspend digits --no-wait",
        "resume digits --no-wait",
        "scale digits --nodes 2 --no-wait",
        "restart digits --no-wait",
        "checkpoints digits",
        "report digits",
        "delete digits --no-wait",
    ],
)
def test_commands_act_on_the_trainingjob_whatever_its_config_map_says(
    kubernetes: Kubernetes, stepper: Stepper, file: Any, kdist: Kdist, command: str
) -> None:
    kubernetes.put("TrainingJob", yaml.safe_load(file.read_text()))
    stepper.settle()
    tamper(kubernetes)
    kubernetes.writes.clear()
    before = copy.deepcopy(kubernetes.objects)
    verb, *words = command.split()
    done = kdist(verb, "-n", "ml", "--timeout", "1", *words)
    assert "internal error" not in done.stderr
    assert "evil" not in done.stderr
    assert {kind for _, kind, _ in kubernetes.writes} <= {"TrainingJob", "Pod"} or verb == "delete"
    for place, document in kubernetes.objects.items():
        assert place.namespace == "ml"
        if before.get(place) != document:
            assert "evil" not in json.dumps(document)
    spec = (kubernetes.find("TrainingJob", "digits") or JOB)["spec"]
    assert spec["image"] == JOB["spec"]["image"]
