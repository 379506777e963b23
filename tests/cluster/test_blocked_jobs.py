"""What can keep a job from running: `kdist why` names the one cause, though other symptoms stand
next to it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.conftest import BURST, Job
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

FEW = {"cpu": 0.3, "memory": "700Mi"}
SMALL: dict[str, Any] = {"resources": FEW, "podTemplate": {"spec": {"containers": [BURST]}}}


def why(namespace: Namespace) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(namespace.kdist("why", "digits", "-o", "json"))
    return answer


def expect(namespace: Namespace, cause: str, *words: str) -> dict[str, Any]:
    """Ask until the cause is named; then its sentence and evidence hold these words, and a next
    command is there.
    """
    answer = namespace.until(
        f"`kdist why` names {cause}",
        lambda: (printed := why(namespace))["cause"] == cause and printed,
    )
    assert answer, why(namespace)
    text = json.dumps(answer)
    for word in words:
        assert word in text
    assert answer["commands"]
    return answer


@pytest.mark.sampled
def test_a_quota_that_is_used_up_is_named_with_its_numbers(namespace: Namespace, job: Job) -> None:
    namespace.kubectl("create", "quota", "small", "--hard=pods=1")
    namespace.apply(job(resources=FEW))
    expect(namespace, "quota", "small", "pods=1")


@pytest.mark.sampled
def test_the_users_mistake_ends_the_job_at_once_with_its_line(
    namespace: Namespace, job: Job
) -> None:
    namespace.apply(job(**SMALL, code="./src", script={"path": "mistake.py"}, checkpoints=None))
    namespace.kdist("wait", "digits", "--timeout=3m", code=10)
    expect(namespace, "user-code", "the answer is 41", "mistake.py")
    reported = namespace.status("digits")
    assert reported["phase"] == "Failed"
    assert reported["exitRecord"]["code"] == 70
    failed = namespace.get("job.batch", "digits")
    assert any(
        each["type"] == "Failed" and each["reason"] == "PodFailurePolicy"
        for each in failed["status"]["conditions"]
    )


@pytest.mark.sampled
def test_a_rank_that_takes_too_much_memory_is_named_before_the_peers_it_took_along(
    namespace: Namespace, job: Job
) -> None:
    namespace.apply(
        job(**SMALL, code="./src", script={"path": "greedy.py"}, checkpoints=None, maxRestarts=0)
    )
    expect(namespace, "out-of-memory", "memory")


@pytest.mark.sampled
def test_a_rank_that_hangs_for_good_is_named_with_where_it_stood(
    namespace: Namespace, job: Job
) -> None:
    namespace.apply(
        job(
            **SMALL,
            code="./src",
            hangTimeoutSeconds=10,
            maxRestarts=0,
            train={"workload": "calm:Stuck"},
        )
    )
    namespace.kdist("wait", "digits", "--timeout=4m", code=10, timeout=300)
    expect(namespace, "budget", "rank 1 hangs", "hangTimeoutSeconds", "calm.py")
