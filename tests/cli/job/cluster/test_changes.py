"""When a change of a running job has taken effect."""

from __future__ import annotations

from typing import Any

import pytest

from kdist.agents.metrics import AgentSample
from kdist.job.cluster.changes import know_bounds

OLD, NEW = {"min": 1, "max": 1}, {"min": 1, "max": 2}


@pytest.mark.parametrize(
    ("reports", "known"),
    [
        ([{"nodes": NEW, "exit": None}], True),
        ([{"nodes": NEW}, {"nodes": OLD}], False),
        ([{"nodes": NEW}, {"nodes": OLD, "exit": {"code": 0}}], True),
        ([{"nodes": OLD, "exit": {"code": 0}}], True),
        ([{}, {"nodes": "1:2"}], True),
    ],
    ids=["known", "one to go", "one is over", "all are over", "an older version"],
)
def test_limits_are_known_once_every_agent_whose_run_goes_on_reports_them(
    reports: list[dict[str, Any]], known: bool
) -> None:
    assert know_bounds(map(AgentSample, reports), 1, 2) is known
