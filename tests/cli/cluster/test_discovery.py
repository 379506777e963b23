"""Which kinds a cluster serves is found out also where one of its APIs is broken."""

from __future__ import annotations

from tests.cli.cluster.api import Reply
from tests.cli.cluster.conftest import Connect, Serve


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
