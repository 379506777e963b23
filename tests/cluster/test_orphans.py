"""What `kubectl delete job --cascade=orphan` leaves is deleted by one command that says so, and the
pods save before they end.
"""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.needs("shared-volumes")]


@pytest.mark.sampled
def test_one_command_deletes_a_job_whose_workload_was_deleted_without_its_pods(
    namespace: Namespace, calm: Job
) -> None:
    never = {"every": {"steps": 1_000_000}}
    namespace.apply(calm(nodes=2, train={"steps": 1_000_000, "checkpoint": never}))
    namespace.kdist("wait", "digits", "--for=first-step", "--timeout=4m")
    namespace.kubectl("delete", "job", "digits", "--cascade=orphan")
    namespace.until(
        "the pods have no owner",
        lambda: not any(pod["metadata"].get("ownerReferences") for pod in namespace.pods("digits")),
    )
    printed = namespace.kdist("delete", "digits", "--orphans")
    assert printed.count("pod/") == 2
    assert namespace.find("pods") == []
    assert namespace.volume("digits")["checkpoints"], "the pods have saved"
    left = namespace.find("configmaps,jobs,services,secrets,roles", "kdist.dev/job=digits")
    assert left == []
