"""A controller of another version that finds running jobs leaves them as they are."""

from __future__ import annotations

from tests.controller.conftest import JobOf, Stepper
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_life import change, condition, read


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
