"""Where a pod is taken every minute and a half, jobs with the default settings go on from where
they were, save, and say what happened. These tests take minutes of a whole cluster.

A Job is disturbed for five minutes only: Kubernetes waits 10 s before it replaces a pod of a Job,
and twice as long after each further loss, so that after a quarter of an hour such a job mostly
waits. `kdist why` says so, and names the kinds that do not wait.
"""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final

import pytest

from tests.cluster.conftest import Job
from tests.cluster.controller import installed
from tests.cluster.fleet import Fleet, Look, judge, tabulate
from tests.cluster.namespace import Namespace
from tests.cluster.test_outages import POD

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.wide,
    pytest.mark.disruptive,
    pytest.mark.needs("helm", "whole-cluster", "shared-volumes"),
    pytest.mark.timeout(3600),
]

EVERY_SECONDS: Final = 90.0
LOOKS: Final = 10
DEFAULTS: Final[Mapping[str, Any]] = {"checkpoint": None}
"""No interval of saves: the job finds it."""


@pytest.fixture
def space(cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """A second namespace, whose jobs no controller looks after."""
    made = Namespace(f"e2e-spot-{secrets.token_hex(4)}", tmp_path_factory.mktemp("home"), cluster)
    made.create()
    yield made
    made.remove()


@pytest.mark.parametrize(
    ("direct", "controlled", "minutes"),
    [(["pytorchjob"], ["statefulset"], 15), (["job", "trainjob", "jobset"], [], 5)],
)
def test_jobs_that_lose_a_pod_every_90_seconds_go_on_and_save(
    namespace: Namespace,
    space: Namespace,  # removed first, so that the volumes of both are freed
    calm: Job,
    direct: list[str],
    controlled: list[str],
    minutes: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as stack:
        fleets = [Fleet(space, direct, controlled=False, train=DEFAULTS)]
        if controlled:
            stack.enter_context(installed(namespace))
            fleets.append(Fleet(namespace, controlled, controlled=True, train=DEFAULTS))
        for fleet in fleets:
            fleet.settle(calm)
        before = [find_progress(fleet) for fleet in fleets]
        looks, taken = take_pods(fleets, seconds=60.0 * minutes)
        after = [find_progress(fleet) for fleet in fleets]
        rows = [
            f"{kind}: {taken[kind]} pods taken, steps {first[kind][0]} to {last[kind][0]}, "
            f"commits {first[kind][1]} to {last[kind][1]}"
            for first, last in zip(before, after, strict=True)
            for kind in first
        ]
        with capsys.disabled():
            told = "\n".join([*rows, str(tabulate([looks], POD)), *sorted(map(str, set(looks)))])
            sys.stdout.write(f"\n{minutes} minutes\n{told}\n")
    assert [look for look in looks if judge(look, POD) == "consequence"] == []
    for first, last in zip(before, after, strict=True):
        for kind, (steps, commits) in first.items():
            assert last[kind][0] > steps + 30 * minutes, rows
            assert last[kind][1] >= commits + minutes // 2, rows


def take_pods(fleets: list[Fleet], *, seconds: float) -> tuple[list[Look], dict[str, int]]:
    """Delete a pod of every job every 90 s, and look at all jobs at ten moments between; returns
    the looks, and how many pods were deleted of each kind.
    """
    draw = random.Random(0)
    taken = {kind: 0 for fleet in fleets for kind in fleet.kinds}
    looks: list[Look] = []
    began = time.monotonic()
    moments = sorted(draw.uniform(0, seconds) for _ in range(LOOKS))
    next_loss = 0.0
    while (now := time.monotonic() - began) < seconds:
        if now >= next_loss:
            next_loss += EVERY_SECONDS
            for fleet in fleets:
                for kind in fleet.kinds:
                    if pods := fleet.pods(kind):
                        pod = draw.choice(pods)
                        fleet.namespace.kubectl("delete", "pod", pod, "--wait=false")
                        taken[kind] += 1
        if moments and now >= moments[0]:
            moments.pop(0)
            looks += [look for fleet in fleets for look in fleet.look()]
        time.sleep(0.5)
    return looks, taken


def find_progress(fleet: Fleet) -> dict[str, tuple[int, int]]:
    """The last step of each job and how often it has committed, by what is on its volume."""
    found = {}
    for kind in fleet.kinds:
        volume = fleet.namespace.volume(kind)
        commits = sum(event["event"] == "commit" for event in volume["events"])
        found[kind] = max((line["step"] for line in volume["steps"]), default=0), commits
    return found
