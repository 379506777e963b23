"""Where objects live on an API server, and which kinds it says it has."""

from __future__ import annotations

import pytest

from kdist.cluster import resources
from tests.cli.cluster.api import Asked, Reply
from tests.cli.cluster.conftest import Connect, Serve


@pytest.mark.parametrize(
    ("kind", "plural"),
    [
        ("Pod", "pods"),
        ("NetworkPolicy", "networkpolicies"),
        ("StorageClass", "storageclasses"),
        ("PyTorchJob", "pytorchjobs"),
        ("Gateway", "gateways"),
        ("Endpoints", "endpoints"),
        ("Ingress", "ingresses"),
        ("ClusterTrainingRuntime", "clustertrainingruntimes"),
    ],
)
def test_a_kind_has_the_plural_that_the_api_machinery_gives_it(kind: str, plural: str) -> None:
    assert resources.plural(kind) == plural


def test_a_path_holds_namespace_name_and_part_where_there_are_any() -> None:
    expected = "/api/v1/namespaces/ml/pods/a/log"
    assert resources.path("v1", "Pod", namespace="ml", name="a", subresource="log") == expected
    assert resources.path("batch/v1", "Job") == "/apis/batch/v1/jobs"
    assert resources.path("v1", "Node", namespace="ml", name="n") == "/api/v1/nodes/n"
    expected = "/api/v1/namespaces/ml/pods/..%2F..%2Fsecrets%2Fx"
    assert resources.path("v1", "Pod", namespace="ml", name="../../secrets/x") == expected


def test_kinds_are_read_from_the_answer_for_all_groups_at_once(
    serve: Serve, connect: Connect
) -> None:
    def answer(asked: Asked) -> Reply:
        if asked.path == "/api":
            versions = [{"version": "v1", "resources": [{"responseKind": {"kind": "Pod"}}]}]
            return Reply(document={"items": [{"metadata": {}, "versions": versions}]})
        versions = [
            {"version": "v1", "resources": [{"responseKind": {"kind": "Job"}}, {"resource": "odd"}]}
        ]
        return Reply(document={"items": [{"metadata": {"name": "batch"}, "versions": versions}]})

    api = serve(answer)
    assert connect(api.url).kinds() == {("v1", "Pod"), ("batch/v1", "Job")}
    assert len(api.asked) == 2
