"""Where no Role may be granted, pod 0 holds what the agents share: they train without any right,
and outlive pod 0 too.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace
from tests.cluster.test_completion import every_kind
from tests.cluster.test_faults import exactly_once, kill_rank
from tests.cluster.test_scale_and_suspend import world_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.sampled
@every_kind
def test_a_job_without_a_role_goes_on_after_a_killed_rank_and_after_the_loss_of_pod_0(
    namespace: Namespace, calm: Job, kind: str
) -> None:
    namespace.apply(calm(backend=kind, rendezvous="c10d", train={"steps": 150}))
    assert namespace.find("roles", "kdist.dev/job=digits") == []
    reported = namespace.until(
        "both nodes train, and have saved", partial(world_of, namespace, 2, 25)
    )
    assert reported
    pods = [pod["metadata"]["name"] for pod in namespace.pods("digits")]

    kill_rank(namespace)
    reported = namespace.until(
        "both train again", partial(world_of, namespace, 2, int(reported["step"]))
    )
    assert reported
    assert [pod["metadata"]["name"] for pod in namespace.pods("digits")] == pods, (
        "a killed rank costs no pod"
    )

    namespace.kubectl("delete", "pod", pods[0], "--grace-period=1", "--wait=false")
    namespace.kdist("wait", "digits", "--timeout=8m", timeout=500)
    volume = namespace.volume("digits")
    assert volume["done"]["step"] == 150
    assert exactly_once(volume["steps"], volume["events"])
    formed = [event["from_step"] for event in volume["events"] if event["event"] == "generation"]
    assert len(formed) >= 3
    assert formed[0] == 0
    assert min(formed[1:]) > 0, "it went on from checkpoints"
