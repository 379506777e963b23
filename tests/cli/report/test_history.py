"""When a job in the cluster was meant to run, and what a kubelet's words say of a pull."""

from __future__ import annotations

from typing import Any

import pytest

from kdist.report.history import (
    _read_startup,
    active_intervals,
    find_nonfinite_loss,
    list_images,
    pull_seconds,
)
from kdist.status import OUTCOME, ExitRecord, NonfiniteLoss
from tests.cli.status.objects import RUNS, ended_pod, fetching_pod, record, terminated

STOPPED = {"event": "stopped", "time": 50.0}
RESUMED = {"event": "generation", "reason": "resume", "time": 90.0}


def test_the_time_between_a_stop_and_the_resume_is_no_life() -> None:
    events = [{"event": "generation", "reason": "start", "time": 20.0}, STOPPED, RESUMED]
    assert list(active_intervals(events, 10.0, 120.0, [11.0, 80.0, 84.0])) == [
        (10.0, 50.0),
        (80.0, 120.0),
    ]
    assert list(active_intervals(events, 10.0, 120.0, [])) == [(10.0, 50.0), (90.0, 120.0)]


def test_a_stopped_job_lives_until_it_stopped_and_a_running_one_until_now() -> None:
    assert list(active_intervals([STOPPED], 10.0, 120.0, [])) == [(10.0, 50.0)]
    assert list(active_intervals([], 10.0, None, [])) == [(10.0, None)]


def test_ranks_that_stop_so_that_others_may_join_do_not_end_a_life() -> None:
    joined = {"event": "generation", "reason": "join", "time": 55.0}
    assert list(
        active_intervals([STOPPED, joined, {"event": "x", "time": "?"}], 10.0, 120.0, [])
    ) == [(10.0, 120.0)]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            'Successfully pulled image "a" in 3.25s (3.25s including waiting). '
            "Image size: 1 bytes.",
            3.25,
        ),
        ('Successfully pulled image "a" in 240ms (1m0s including waiting)', 0.24),
        ('Successfully pulled image "a" in 2m5.5s (2m5.5s including waiting)', 125.5),
        ('Container image "a" already present on machine', 0.0),
    ],
)
def test_pull_times_are_read_from_the_kubelets_words(message: str, expected: float) -> None:
    assert pull_seconds(message) == expected


def test_a_pod_has_fetched_when_the_last_of_its_init_containers_has_that_fetches() -> None:
    ends = [{"state": terminated(0, "Completed", ago=ago)} for ago in (40, 20, 10)]
    names = ("fetch-data-0", "fetch-init", "own")
    fetched = _read_startup(fetching_pod(0, *ends, names=names), []).fetched
    second = _read_startup(fetching_pod(0, ends[1]), []).fetched
    assert fetched == second
    assert fetched is not None
    assert _read_startup(fetching_pod(0, RUNS), []).fetched is None


def test_a_loss_that_was_not_finite_is_found_in_the_pods_and_in_what_was_kept_of_them() -> None:
    quiet = record(0, None, outcome="done")
    told = {**quiet, "nonfinite_loss": {"steps": 9, "last": "nan"}}
    pods = [ended_pod(0, 0, record=quiet), ended_pod(1, 0, record=told)]
    assert find_nonfinite_loss(pods, None) == NonfiniteLoss(9, "nan")
    assert find_nonfinite_loss(pods[:1], {}) is None
    kept = ExitRecord.read(told)
    assert kept is not None
    workload = {"metadata": {"annotations": {OUTCOME: kept.to_text()}}}
    assert find_nonfinite_loss([], workload) == NonfiniteLoss(9, "nan")


def test_the_digests_of_the_trainings_images_are_read_from_its_pods() -> None:
    statuses = [{"name": "trainer", "imageID": "r/i@sha256:1"}, {"name": "proxy", "imageID": "p"}]
    pods: list[dict[str, Any]] = [
        {"status": {"containerStatuses": each}} for each in (statuses, None)
    ]
    assert list_images([*pods, *pods, {}], "trainer") == ["r/i@sha256:1"]
