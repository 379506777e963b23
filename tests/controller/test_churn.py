"""A controller whose TrainingJobs come, change and go holds as much after very many of them as
after a few.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence

import pytest

from tests.controller.conftest import JobOf
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_process import Replica, Start, start, until
from tests.process_usage import count

__all__ = ["start"]

GROWTH_KIB = 8 << 10
CONNECTIONS = 8
"""How many of its threads may not have asked the API server yet at the first look."""
AT_ONCE = 5
_SHARE = 5
"""Of all reconciles, one in so many comes before the first look, when all is made once."""


def reconciles(replica: Replica) -> int:
    """How often it has looked at a TrainingJob."""
    found = re.search(
        r"^kdist_controller_reconcile_seconds_count (\S+)", replica.get("/metrics")[1], re.MULTILINE
    )
    return round(float(found[1])) if found else 0


def churn(kubernetes: Kubernetes, job: JobOf, replica: Replica, *, until_reconciles: int) -> None:
    """Let jobs of ever new names come, change and go, until the controller has looked so often."""
    for number in itertools.count(reconciles(replica)):
        if reconciles(replica) >= until_reconciles:
            return
        come_and_go(kubernetes, job, [f"job-{number}-{each}" for each in range(AT_ONCE)])


def come_and_go(kubernetes: Kubernetes, job: JobOf, names: Sequence[str]) -> None:
    """Let jobs come, become smaller and go."""

    def last_pods() -> set[tuple[str, str]]:
        return {("Pod", f"{name}-3") for name in names} & kubernetes.names()

    for name in names:
        kubernetes.put("TrainingJob", job(name))
    until(lambda: len(last_pods()) == len(names))
    for name in names:
        kubernetes.put("TrainingJob", {"metadata": {"name": name}, "spec": {"replicas": 2}})
    until(lambda: not last_pods())
    for name in names:
        kubernetes.remove("TrainingJob", name)
    until(lambda: not any(kind == "Pod" for kind, _ in kubernetes.names()))


@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "times",
    [
        pytest.param(300, marks=pytest.mark.sampled),
        pytest.param(10_000, marks=[pytest.mark.chaos, pytest.mark.wide]),
    ],
)
def test_jobs_that_come_and_go_leave_nothing_in_the_controller(
    start: Start, kubernetes: Kubernetes, job: JobOf, times: int
) -> None:
    replica = start("first")
    until(replica.leads)
    churn(kubernetes, job, replica, until_reconciles=times // _SHARE)
    few = count(replica.process.pid)
    churn(kubernetes, job, replica, until_reconciles=times)
    many = count(replica.process.pid)
    sys.stdout.write(f"{reconciles(replica)} reconciles: {few} -> {many}\n")
    assert many.private_kib <= few.private_kib + GROWTH_KIB
    assert many.descriptors <= few.descriptors + CONNECTIONS
    assert many.threads <= few.threads + 3
    assert "Traceback" not in replica.log()
