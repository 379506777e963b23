"""A controller of another version that finds running jobs leaves them as they are."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from kdist_controller import resource
from kdist_controller.resource import digest_text
from kdist_trainer.config import TrainConfig
from tests.controller.conftest import JobOf, Stepper
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_life import change, condition, read


@pytest.mark.parametrize("value", ["none", "warm"])
def test_a_job_with_a_setting_that_was_removed_runs_on(
    value: str, kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job(standby=value))
    stepper.settle()
    text = read(kubernetes, "ConfigMap", "digits")["data"]["job.json"]
    stored = json.loads(text)
    stored["spec"]["standby"] = value  # as the earlier controller has recorded it
    text, named = json.dumps(stored), {"metadata": {"name": "digits"}}
    kubernetes.put("ConfigMap", {**named, "data": {"job.json": text}})
    status = {"appliedDigests": [digest_text(text)]}
    kubernetes.put("TrainingJob", {**named, "status": status})
    before = read_all(kubernetes)
    stepper.settle()
    assert condition(kubernetes, "Accepted")[0] == "True"
    assert condition(kubernetes, "Outdated")[0] == "False"
    assert read_all(kubernetes) == before, "its objects are not touched"
    change(kubernetes, nodes={"min": 1, "max": 3})
    stepper.settle()
    assert condition(kubernetes, "Outdated")[0] == "False", "it is scaled as before"


@pytest.mark.parametrize("gone", [("Service", "digits"), ("ServiceAccount", "digits")])
@pytest.mark.parametrize("backend", ["job", "statefulset"])
def test_an_object_that_is_made_again_takes_no_settings_from_the_pods_that_mount_them(
    kubernetes: Kubernetes,
    stepper: Stepper,
    job: JobOf,
    monkeypatch: pytest.MonkeyPatch,
    gone: tuple[str, str],
    backend: str,
) -> None:
    plain = TrainConfig.to_document
    with monkeypatch.context() as earlier:  # a version whose train.json had one more field
        earlier.setattr(TrainConfig, "to_document", lambda self: {**plain(self), "standby": "none"})
        resource._render.cache_clear()
        kubernetes.put("TrainingJob", job(backend=backend))
        stepper.settle()
    resource._render.cache_clear()
    (settings,) = (each for each in kubernetes.names() if "-train-" in each[1])
    kubernetes.remove(*gone)
    stepper.settle()
    assert gone in kubernetes.names()
    assert [each for each in kubernetes.names() if "-train-" in each[1]] == [settings]
    (workload,) = (each for each in kubernetes.names() if each[0] in ("Job", "StatefulSet"))
    assert settings[1] in json.dumps(read(kubernetes, *workload))


def read_all(kubernetes: Kubernetes) -> dict[tuple[str, str], Any]:
    """All objects but the TrainingJob, as they are now."""
    names = [each for each in kubernetes.names() if each[0] != "TrainingJob"]
    return deepcopy({each: read(kubernetes, *each) for each in names})


def test_a_job_whose_interval_an_earlier_version_has_written_out_keeps_its_pods(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    train = {"workload": "digits", "epochs": 3, "globalBatch": 64}
    # what an earlier controller made of a job that names no interval
    kubernetes.put("TrainingJob", job(train={**train, "checkpoint": {"every": {"seconds": 300}}}))
    stepper.settle()
    before = {(kind, name): read(kubernetes, kind, name) for kind, name in kubernetes.names()}
    change(kubernetes, train={"checkpoint": None})
    stepper.settle()
    assert condition(kubernetes, "Outdated")[0] == "False"
    after = {(kind, name): read(kubernetes, kind, name) for kind, name in kubernetes.names()}
    assert after.keys() == before.keys()
    for key in before.keys() - {("TrainingJob", "digits"), ("ConfigMap", "digits")}:
        assert after[key] == before[key], key
    change(kubernetes, nodes={"min": 1, "max": 3})
    stepper.settle()
    assert condition(kubernetes, "Outdated")[0] == "False", "it is scaled as before"
    change(kubernetes, train={"checkpoint": {"every": {"seconds": 60}}})
    stepper.settle()
    assert condition(kubernetes, "Outdated")[0] == "True", "another interval needs new pods"
