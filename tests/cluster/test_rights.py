"""What the pods of a job may do, as the API server itself sees it, and that it takes every object as it is rendered."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Job
from tests.cluster.kinds import RESOURCE, each_kind
from tests.cluster.namespace import Namespace

pytestmark = pytest.mark.e2e

# What Kubernetes lets every account ask about itself and its API.
EVERYBODYS = ("selfsubject", "/api", "/healthz", "/livez", "/openapi", "/openid", "/readyz", "/version", "/.well-known")


@each_kind
def test_the_api_server_takes_every_object_without_a_warning(namespace: Namespace, kind: str, calm: Job) -> None:
    namespace.write(calm(backend=kind, image="localhost:5000/nobody/nothing:1.0"))
    namespace.copy_sources()
    sent = namespace.type_kdist("apply", "job.yaml")
    assert sent.returncode == 0, sent.stderr
    assert RESOURCE[kind].split(".")[0] in sent.stdout.lower()
    assert "unknown field" not in sent.stderr
    assert "would violate PodSecurity" not in sent.stderr


def test_a_pods_account_may_touch_the_rendezvous_and_nothing_else(namespace: Namespace, calm: Job) -> None:
    namespace.apply(calm(image="localhost:5000/nobody/nothing:1.0"))
    account = f"system:serviceaccount:{namespace.name}:digits"
    rights = namespace.kubectl("auth", "can-i", "--list", f"--as={account}").splitlines()[1:]
    own = [line.split() for line in rights if not any(word in line.split()[0] + line for word in EVERYBODYS)]
    assert own == [["configmaps", "[]", "[digits-rendezvous]", "[get", "update]"]]


def test_no_other_account_than_the_jobs_own_is_in_its_pods(namespace: Namespace, calm: Job) -> None:
    namespace.apply(calm(image="localhost:5000/nobody/nothing:1.0"))
    pods = namespace.until("pods are made", lambda: namespace.pods("digits"))
    for pod in pods:
        assert pod["spec"]["serviceAccountName"] == "digits"
        assert pod["spec"]["automountServiceAccountToken"] is False
        tokens = [
            source["serviceAccountToken"]
            for volume in pod["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        ]
        assert [token["expirationSeconds"] for token in tokens] == [3600]
