"""Which kinds a cluster serves is found out also where one of its APIs is broken."""

from __future__ import annotations

from tests.cli.cluster.api import Asked, Reply, refusal
from tests.cli.cluster.conftest import Connect, Serve

JOBS = {"resources": [{"name": "jobs", "kind": "Job"}, {"name": "jobs/status", "kind": "Job"}]}


def test_a_broken_aggregated_api_hides_no_kind_of_another(
    serve: Serve, connect: Connect, reported: list[str]
) -> None:
    def answer(asked: Asked) -> Reply:
        groups = [
            {"versions": [{"groupVersion": name}]}
            for name in ("metrics.k8s.io/v1beta1", "batch/v1")
        ]
        lists = {"/api": {"versions": []}, "/apis": {"groups": groups}, "/apis/batch/v1": JOBS}
        return (
            Reply(document=lists[asked.path])
            if asked.path in lists
            else refusal(503, "service unavailable")
        )

    assert connect(serve(answer).url).kinds() == {("batch/v1", "Job")}
    assert reported == []


def test_a_stale_group_of_an_aggregated_answer_is_empty(serve: Serve, connect: Connect) -> None:
    stale = {
        "metadata": {"name": "metrics.k8s.io"},
        "versions": [{"version": "v1beta1", "freshness": "Stale"}],
    }
    served = {
        "metadata": {"name": "batch"},
        "versions": [{"version": "v1", "resources": [{"responseKind": {"kind": "Job"}}]}],
    }
    api = serve(
        lambda asked: Reply(document={"items": [stale, served] if asked.path == "/apis" else []})
    )
    assert connect(api.url).kinds() == {("batch/v1", "Job")}
