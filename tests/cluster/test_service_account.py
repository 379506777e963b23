"""A job's ServiceAccount is deleted while it runs: it trains on, and ends in the state that is
asked for as soon as others do.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace
from tests.cluster.test_completion import end_is_recorded

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.needs("shared-volumes")]

STEPS = 300
SECONDS = 90.0
"""From what is asked for until it is so, on a loaded machine; pods may take 20 s to end."""


def start(namespace: Namespace, calm: Job, steps: int) -> None:
    """Start a job of two nodes, and delete its ServiceAccount once it trains."""
    namespace.apply(calm(nodes=2, train={"steps": steps}))
    namespace.kdist("wait", "digits", "--for=first-step", "--timeout=4m")
    namespace.kubectl("delete", "serviceaccount", "digits")


def tell(capsys: pytest.CaptureFixture[str], what: str, seconds: float) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{what} after {seconds:.0f} s\n")


@pytest.mark.sampled
def test_a_job_without_its_serviceaccount_ends_with_the_outcome_of_its_training(
    namespace: Namespace, calm: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    start(namespace, calm, STEPS)
    namespace.until("the end is recorded", partial(end_is_recorded, namespace))
    began = time.monotonic()
    namespace.kdist("wait", "digits", f"--timeout={SECONDS:.0f}s")
    tell(capsys, "the job is done", time.monotonic() - began)
    assert namespace.status("digits")["phase"] == "Succeeded"
    volume = namespace.volume("digits")
    assert volume["done"]["outcome"] == "done"
    assert [line["step"] for line in volume["steps"]] == list(range(1, STEPS + 1))


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["suspend", pytest.param("delete", marks=pytest.mark.wide)])
def test_a_job_without_its_serviceaccount_is_suspended_and_deleted_at_once(
    command: str, namespace: Namespace, calm: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    start(namespace, calm, 1_000_000)
    began = time.monotonic()
    namespace.kdist(command, "digits", timeout=SECONDS)
    namespace.until("its pods are gone", lambda: not namespace.pods("digits"), SECONDS)
    tell(capsys, command, time.monotonic() - began)
    assert bool(namespace.get("job", "digits")) is (command == "suspend")
