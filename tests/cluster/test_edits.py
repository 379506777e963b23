"""A job that runs is edited: a lost pod comes back as it was, and the edit takes effect whole or
not at all.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.kinds import RESOURCE
from tests.cluster.namespace import Namespace
from tests.cluster.test_faults import delete_first, exactly_once, training
from tests.cluster.test_repair import render

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.timeout(600)]

EDITS = ("--set", "spec.train.globalBatch=24", "--set", "spec.train.optimizer.learningRate=0.0005")
TOLD = "globalBatch 128 -> 24: taken over; optimizer.learningRate 0.001 -> 0.0005: taken over"
LONG = {"steps": 1_000_000, "evaluate": "never"}
# The kinds whose pods cannot be told to be others: they refuse an edit while they run.
FIXED = ("job", "jobset")


def read_batch_of_each_pod(namespace: Namespace) -> dict[str, int]:
    """`globalBatch` of the file from which the ranks of each pod read it."""
    names = [pod["metadata"]["name"] for pod in namespace.pods("digits")]
    files = {
        name: namespace.kubectl("exec", name, "--", "cat", "/etc/kdist/train.json")
        for name in names
    }
    return {name: json.loads(text)["train"]["globalBatch"] for name, text in files.items()}


def batches(steps: list[dict[str, Any]]) -> dict[int, set[int]]:
    """How many samples the steps of each generation took, by the ledger."""
    found: dict[int, set[int]] = {}
    for step in steps:
        found.setdefault(step["generation"], set()).add(step["last"] - step["first"] + 1)
    return found


def lose_a_pod(namespace: Namespace) -> None:
    """Delete a pod of a job whose two nodes train, and wait until both train again."""
    before = namespace.until("both nodes train", partial(training, namespace))
    assert before
    delete_first(namespace)
    namespace.until(
        "both train again", partial(training, namespace, after=int(before["generation"]))
    )


def learning_rate(namespace: Namespace) -> float:
    """The rate that the agent of rank 0 tells, once it does; 0 before."""
    return next(
        (
            float(each["learning_rate"])
            for each in namespace.agents("digits")
            if each.get("learning_rate")
        ),
        0.0,
    )


def assert_taken_over(namespace: Namespace) -> None:
    """The job goes on from a checkpoint, says what was edited, and trains with it."""
    reported = namespace.until("both nodes train", partial(training, namespace))
    assert reported
    assert namespace.until("a learning rate", partial(learning_rate, namespace)) == pytest.approx(
        0.0005
    )
    assert set(read_batch_of_each_pod(namespace).values()) == {24}
    logs = "".join(
        namespace.kubectl("logs", pod["metadata"]["name"]) for pod in namespace.pods("digits")
    )
    assert TOLD in logs
    namespace.kdist("suspend", "digits")
    volume = namespace.volume("digits")
    assert batches(volume["steps"])[reported["generation"]] == {24}
    (formed,) = [
        each
        for each in volume["events"]
        if (each["event"], each.get("generation")) == ("generation", reported["generation"])
    ]
    assert formed["from_step"] > 0
    assert exactly_once(volume["steps"], volume["events"])


def test_a_run_whose_changed_render_is_refused_loses_a_pod_and_goes_on_as_it_was(
    namespace: Namespace, calm: Job
) -> None:
    namespace.copy_sources()
    file = namespace.write(calm())
    render(namespace, file, "--claims=only")
    render(namespace, file)
    namespace.until("both nodes train", partial(training, namespace))
    changed = namespace.write(calm(train={"globalBatch": 24}), "changed.yaml")
    with pytest.raises(AssertionError, match="field is immutable"):
        render(namespace, changed)
    lose_a_pod(namespace)
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    volume = namespace.volume("digits")
    assert (volume["done"]["outcome"], volume["done"]["step"]) == ("done", 300)
    found = batches(volume["steps"])
    assert len(found) > 1
    assert set().union(*found.values()) == {128}
    assert exactly_once(volume["steps"], volume["events"])


@pytest.mark.parametrize("kind", [kind for kind in RESOURCE if kind not in FIXED])
def test_an_edit_of_a_running_job_waits_for_its_restart_and_is_taken_over_then(
    namespace: Namespace, calm: Job, kind: str
) -> None:
    namespace.apply(calm(backend=kind, train=LONG))
    namespace.until("both nodes train", partial(training, namespace))
    namespace.kdist("apply", "job.yaml", *EDITS)
    lose_a_pod(namespace)
    assert namespace.until("a learning rate", partial(learning_rate, namespace)) == pytest.approx(
        0.001
    )
    assert list(read_batch_of_each_pod(namespace).values()) == [128, 128]
    assert "resumes after step" in namespace.kdist("restart", "digits")
    assert_taken_over(namespace)


@pytest.mark.parametrize("kind", FIXED)
def test_an_edit_that_a_running_job_refuses_is_taken_over_once_it_is_deleted_and_sent_again(
    namespace: Namespace, calm: Job, kind: str
) -> None:
    namespace.apply(calm(backend=kind, train=LONG))
    namespace.until("both nodes train", partial(training, namespace))
    refused = namespace.type_kdist("apply", "job.yaml", *EDITS)
    assert refused.returncode == 1
    assert "cannot be changed while it exists" in refused.stderr
    assert f"Next: kdist delete digits -n {namespace.name}" in refused.stderr
    namespace.kdist("delete", "digits")
    namespace.kdist("apply", "job.yaml", *EDITS)
    assert_taken_over(namespace)
