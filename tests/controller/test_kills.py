"""The controller may die at any moment: before a change reaches the API server or after, it is made
once, and what was asked for is reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kdist.cluster.transport import ApiRequest, ApiResponse, Transport
from tests.controller.conftest import JobOf, Stepper
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_life import END, change, condition, read

Ask = Callable[[Kubernetes], object]

ASKED: dict[str, Ask] = {
    "suspend": lambda kubernetes: change(kubernetes, suspend=True),
    "scale": lambda kubernetes: change(kubernetes, replicas=2),
    "grow": lambda kubernetes: change(kubernetes, nodes={"min": 2, "max": 5}),
    "restart": lambda kubernetes: change(
        kubernetes, restartedAt="2026-05-01T12:00:00Z", image="registry.example.com/other:2"
    ),
    "avoid": lambda kubernetes: kubernetes.reports.update(
        {"digits-0": {"machine_faults": [{"machine": "node-1", "faults": 2}]}}
    ),
    "end": lambda kubernetes: kubernetes.put(
        "Job", {"metadata": {"name": "digits"}, "status": {"conditions": [END]}}
    ),
    "delete": lambda kubernetes: kubernetes.remove("TrainingJob", "digits"),
}


class _Killed(BaseException):
    """The controller is no more."""


def _kill_at(monkeypatch: pytest.MonkeyPatch, number: int, *, late: bool) -> Callable[[], bool]:
    """Have the controller die at its change of this number; returns whether it came so far."""
    count = itertools.count()
    reached = []
    send = Transport.send

    def dying(self: Transport, request: ApiRequest) -> ApiResponse:
        if request.method == "GET" or next(count) != number:
            return send(self, request)
        reached.append(request)
        if late:
            send(self, request)
        raise _Killed

    monkeypatch.setattr(Transport, "send", dying)
    return lambda: bool(reached)


def _outcome(kubernetes: Kubernetes) -> tuple[Any, ...]:
    """What a person sees of the job, and what there is of it."""
    found = kubernetes.find("TrainingJob", "digits")
    status = {} if found is None else dict(found["status"])
    conditions = {each["type"]: each["status"] for each in status.pop("conditions", [])}
    status["avoidedNodes"] = [each.partition(" ")[0] for each in status.get("avoidedNodes", [])]
    return kubernetes.names(), status, conditions


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("asked", ["create", *ASKED])
@pytest.mark.sampled
def test_a_killed_controller_does_nothing_twice_and_finishes_what_was_asked(
    asked: str,
    late: bool,
    kubernetes: Kubernetes,
    stepper: Stepper,
    job: JobOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin() -> None:
        kubernetes.clear()
        kubernetes.reports.clear()
        kubernetes.put("TrainingJob", job(checkpoints={"size": "1Gi"}))
        if asked != "create":
            stepper.settle()
            ASKED[asked](kubernetes)

    begin()
    stepper.settle()
    expected, deletions = _outcome(kubernetes), _deletions(kubernetes)
    for number in itertools.count():
        begin()
        with monkeypatch.context() as patch:
            reached = _kill_at(patch, number, late=late)
            with suppress(_Killed):
                stepper.settle()
        stepper.settle()
        assert _outcome(kubernetes) == expected, f"killed at change {number}"
        assert _deletions(kubernetes) == deletions, f"killed at change {number}"
        if not reached():
            assert number or asked == "delete"
            break


def _deletions(kubernetes: Kubernetes) -> int:
    """How often the workload was deleted."""
    return kubernetes.writes.count(("DELETE", "Job", "digits"))


def test_a_restart_that_is_cut_short_is_not_begun_again_by_the_next_leader(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job(restartedAt="2026-05-01T12:00:00Z"))
    stepper.settle()
    assert _deletions(kubernetes) == 0
    assert condition(kubernetes, "Accepted")[0] == "True"
    assert read(kubernetes, "TrainingJob")["status"]["restartedAt"] == "2026-05-01T12:00:00Z"
