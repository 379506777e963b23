"""A job leaves a node that it is to avoid, by its own pod there and nothing else, stays away from
it for the time, and uses it again afterwards.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from kdist.recovery import name_marker
from tests.cluster.conftest import Job
from tests.cluster.kinds import every_kind
from tests.cluster.namespace import Namespace
from tests.cluster.test_dead_node import place_bystander, workers
from tests.cluster.test_scale_and_suspend import world_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@every_kind
def test_a_job_leaves_a_node_for_the_time_that_it_avoids_it_and_no_other_pod_does(
    namespace: Namespace, cluster: dict[str, str], calm: Job, kind: str
) -> None:
    node = min(workers(cluster))
    pinned = {"kubernetes.io/hostname": node}
    namespace.apply(calm(backend=kind, nodes=1, nodeSelector=pinned, train={"steps": 1200}))
    before = namespace.until("it trains", partial(world_of, namespace, 1)) or {}
    bystander = place_bystander(namespace, node)
    namespace.kdist("recover", "digits", "--avoid", node, "--for", "60s")

    def cause() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(namespace.kdist("why", "digits", "-o", "json"))
        return found if found["cause"] == "nodes-avoided" else {}

    found = namespace.until("no node takes its pod", cause)
    assert node in found["sentence"]
    assert "--allow" in found["commands"][0]
    marker = name_marker("digits", node)
    namespace.until("a restricted pod sleeps there", partial(_is_ready, namespace, marker))
    namespace.until("the marker is gone", lambda: not namespace.get("job", marker), 120)
    after = partial(world_of, namespace, 1, before["step"])
    namespace.until("it trains on, on the node", after)
    (pod,) = namespace.pods("digits")
    assert pod["spec"]["nodeName"] == node
    assert namespace.get("pod", "bystander")["metadata"]["uid"] == bystander["metadata"]["uid"]


def _is_ready(namespace: Namespace, job: str) -> bool:
    return bool(namespace.get("job", job).get("status", {}).get("ready"))
