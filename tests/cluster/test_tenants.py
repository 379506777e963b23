"""What alice (`edit` in team-a), vera (`view` in team-a) and eve (`edit` in team-b) try on a
cluster with a controller for all namespaces has no effect outside of their namespace, nor on
objects that are not the job's. The table is in `attempts`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.attempts import TABLE
from tests.cluster.conftest import Job
from tests.cluster.controller import send, wait_for
from tests.cluster.namespace import Namespace
from tests.cluster.tenants import VERA, Tenants, may, settled

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.needs("helm", "whole-cluster", "shared-volumes"),
    pytest.mark.timeout(1500),
]

STEPS = 1_000_000


@pytest.fixture
def tenants(cluster: dict[str, str], namespace: Namespace, tmp_path: Path) -> Iterator[Tenants]:
    """The three users, and the controller for all namespaces."""
    spaces = []
    for part in ("team-b", "system"):
        (tmp_path / part).mkdir()
        spaces.append(Namespace(f"{namespace.name}-{part}", tmp_path / part, cluster))
    team_b, system = spaces
    system.create()
    try:
        with settled(namespace, team_b, system) as found:
            yield found
    finally:
        system.remove()


def test_nothing_that_a_tenant_writes_reaches_beyond_her_own(
    tenants: Tenants, calm: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    send(tenants.a, calm(nodes=1, train={"steps": STEPS}))
    wait_for(tenants.a, "Running")
    assert not may(tenants, VERA, "create")
    before, failures = tenants.outside(), []
    for attempt in TABLE:
        outcome = "no effect"
        try:
            attempt.act(tenants)
        except (AssertionError, pytest.fail.Exception) as error:
            outcome = f"FAILED: {error}"
            failures.append(f"{attempt.user}: {attempt.description}: {error}")
        if changed := compare(before, tenants.outside()):
            outcome = f"CHANGED {changed}"
            failures.append(f"{attempt.user}: {attempt.description}: {changed}")
            before = tenants.outside()
        row = f"{attempt.writer:<10} {attempt.user:<6} {attempt.description:<52} {outcome:.200}"
        with capsys.disabled():
            sys.stdout.write(f"{row}\n")
    assert failures == []
    tenants.a.until(
        "the honest job trains on", lambda: tenants.a.status("digits")["phase"] == "Running"
    )


def compare(before: dict[Any, str], after: dict[Any, str]) -> dict[str, list[Any]]:
    """What is new, gone or other."""
    found = {
        "new": sorted(after.keys() - before.keys()),
        "gone": sorted(before.keys() - after.keys()),
        "other": sorted(key for key in before.keys() & after.keys() if before[key] != after[key]),
    }
    return {key: value for key, value in found.items() if value}
