"""A job is changed while it runs: made larger and smaller, suspended and resumed, taken off and
sent once more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.kinds import every_kind
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def world_of(namespace: Namespace, size: int, after: int = 0) -> dict[str, Any] | None:
    """What an agent says, once a group of this size has done a step after step `after`."""
    for reported in namespace.agents("digits"):
        if reported["world_size"] == size and (reported["step"] or 0) > after:
            return reported
    return None


@pytest.mark.sampled
@every_kind
def test_a_suspended_job_gives_its_pods_back_and_goes_on_where_it_was(
    namespace: Namespace, kind: str, calm: Job
) -> None:
    namespace.apply(calm(backend=kind))
    reported = namespace.until("two nodes train", partial(world_of, namespace, 2))
    assert reported
    namespace.kdist("suspend", "digits", "--timeout=3m")
    assert namespace.pods("digits") == []
    assert namespace.status("digits")["phase"] == "Suspended"
    saved = namespace.volume("digits")
    step = int(saved["checkpoints"][0]["step"])
    assert step >= reported["step"]
    assert saved["steps"][-1]["step"] == step

    namespace.kdist("resume", "digits")
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    ended = namespace.volume("digits")
    assert ended["done"]["step"] == 300
    assert [each["step"] for each in ended["steps"]] == list(range(1, 301))


@pytest.mark.sampled
@pytest.mark.parametrize("program", ["kdist", pytest.param("kubectl", marks=pytest.mark.wide)])
def test_a_job_that_is_deleted_while_it_runs_saves_and_goes_on_when_it_is_sent_again(
    namespace: Namespace, calm: Job, program: str
) -> None:
    document = calm(train={"checkpoint": {"every": {"seconds": 3600}}})
    namespace.apply(document)
    reported = namespace.until("two nodes train", partial(world_of, namespace, 2))
    assert reported
    if program == "kdist":
        namespace.kdist("delete", "digits", "--timeout=3m")
    else:  # what the pods meet by goes with the workload, while they save
        namespace.kubectl("delete", "job.batch", "digits", "--cascade=foreground", "--timeout=3m")
    assert namespace.get("job.batch", "digits") == {}
    step = int(namespace.volume("digits")["checkpoints"][0]["step"])
    assert step >= reported["step"]
    namespace.apply(document)
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    ended = namespace.volume("digits")
    assert step in [
        event["from_step"] for event in ended["events"] if event["event"] == "generation"
    ]
    namespace.kdist("delete", "digits", "--purge", "--timeout=3m")
    namespace.until("the claim is gone", lambda: not namespace.get("pvc", "digits-checkpoints"))


@pytest.mark.sampled
def test_a_namespace_with_a_job_in_it_can_be_deleted(namespace: Namespace, calm: Job) -> None:
    namespace.apply(calm())
    namespace.until("two nodes train", partial(world_of, namespace, 2))
    namespace.kubectl("delete", "namespace", namespace.name, "--timeout=120s")
    # for the fixture, which deletes it again
    namespace.kubectl("create", "namespace", namespace.name)
    assert namespace.find("jobs") == []


@pytest.mark.sampled
def test_a_job_with_more_nodes_than_there_is_room_for_trains_on_fewer_and_completes(
    namespace: Namespace, calm: Job
) -> None:
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [APART]}}
    namespace.apply(
        calm(
            nodes={"min": 1, "max": 3},
            podTemplate={"spec": {"affinity": apart}},
            train={"steps": 150},
        )
    )
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    assert namespace.volume("digits")["done"]["step"] == 150


# One pod of the job on each node, and the cluster has two nodes for pods.
APART = {
    "topologyKey": "kubernetes.io/hostname",
    "labelSelector": {"matchLabels": {"kdist.dev/job": "digits"}},
}


@pytest.mark.sampled
def test_an_eviction_takes_one_node_and_another_comes_for_it(
    namespace: Namespace, calm: Job
) -> None:
    namespace.apply(calm(nodes={"min": 1, "max": 2}, joinWindowSeconds=1, train={"steps": 400}))
    reported = namespace.until("two nodes train", partial(world_of, namespace, 2))
    assert reported
    pod = namespace.pods("digits")[0]["metadata"]["name"]
    namespace.evict(pod)
    namespace.until("two nodes train again", partial(world_of, namespace, 2, int(reported["step"])))
    namespace.kdist("wait", "digits", "--timeout=6m", timeout=400)
    assert namespace.volume("digits")["done"]["step"] == 400
