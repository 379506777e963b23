"""The election: one leader, no clock of another machine trusted, a stale leader stopped."""

from __future__ import annotations

import threading
import time

from kdist.cluster import Cluster
from kdist_controller.election import Election
from tests.cli.cluster.api import Api
from tests.controller.kubernetes import Kubernetes
from tests.patience import soon


def candidate(connection: Cluster, identity: str, *, seconds: float = 30.0) -> Election:
    """A candidate with a Lease of so many seconds, who tries often."""
    return Election(
        connection,
        "kdist-controller",
        namespace="ml",
        identity=identity,
        lease_seconds=seconds,
        renew_seconds=seconds * 2 / 3,
        retry_seconds=0.05,
    )


def holder(kubernetes: Kubernetes) -> str:
    """Who holds the Lease."""
    found = kubernetes.find("Lease", "kdist-controller")
    return "" if found is None else str(found["spec"]["holderIdentity"])


def test_the_first_leads_and_the_second_waits_until_it_gives_the_lease_back(
    kubernetes: Kubernetes, connection: Cluster
) -> None:
    first, second = candidate(connection, "first"), candidate(connection, "second")
    assert first.acquire()
    waiting = threading.Thread(target=second.acquire, daemon=True)
    waiting.start()
    assert soon(lambda: second.heard)
    assert (first.leads, second.leads) == (True, False)
    first.stop()
    first.release()
    waiting.join(20.0)
    assert (first.leads, second.leads) == (False, True)
    assert holder(kubernetes) == "second"


def test_a_lease_that_its_holder_renews_is_not_taken_whatever_its_clock_says(
    kubernetes: Kubernetes, connection: Cluster
) -> None:
    spec = {"holderIdentity": "first", "leaseDurationSeconds": 1, "leaseTransitions": 0}
    lease = {"metadata": {"name": "kdist-controller"}, "spec": spec}
    kubernetes.put("Lease", lease)
    second = candidate(connection, "second", seconds=1.0)
    waiting = threading.Thread(target=second.acquire, daemon=True)
    waiting.start()
    for number in range(40):
        renewed = {**spec, "renewTime": f"1999-01-01T00:00:{number:02d}Z"}  # a clock that is wrong
        kubernetes.put("Lease", {**lease, "spec": renewed})
        time.sleep(0.05)
    assert holder(kubernetes) == "first"
    waiting.join(20.0)  # nobody renews it any more
    assert holder(kubernetes) == "second"
    assert kubernetes.find("Lease", "kdist-controller")["spec"]["leaseTransitions"] == 1  # type: ignore[index]


def test_a_leader_that_cannot_renew_is_told_and_leads_no_longer(
    connection: Cluster, api: Api
) -> None:
    lost = threading.Event()
    first = candidate(connection, "first", seconds=1.0)
    assert first.acquire()
    first.keep(lost.set)
    api.close()
    assert lost.wait(30.0)
    assert not first.leads


def test_who_is_told_to_stop_waits_no_longer(connection: Cluster) -> None:
    first, second = candidate(connection, "first"), candidate(connection, "second")
    assert first.acquire()
    second.stop()
    assert not second.acquire()
