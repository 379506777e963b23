"""The phase follows from the strongest evidence: the workload's end, the user's requests, the
agents, and last the pods. The pace of a training follows from its recent steps.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from kdist.status import JobStatus, Phase, Snapshot, WorkloadState
from kdist.status.step_history import StepHistory
from tests.cli.status.objects import (
    NOW,
    config_map,
    ended_pod,
    lost_pod,
    pod,
    record,
    report,
    unscheduled,
    waiting,
    workload,
)

ACTIVE = WorkloadState(active=2)
SUSPENDED = WorkloadState(suspended=True)
DONE = WorkloadState(succeeded=2, finished="succeeded")
FAILED = WorkloadState(
    failed=1,
    finished="failed",
    reason="PodFailurePolicy",
    message="container failed with exit code 70",
)
FIRST, SECOND = "digits-0-abcde", "digits-1-abcde"
BOTH = [pod(0), pod(1)]
FRESH: Any = {"step": None, "last_checkpoint_step": None}
QUEUED = {
    **workload(),
    "metadata": {**workload()["metadata"], "labels": {"kueue.x-k8s.io/queue-name": "team-a"}},
}
STOPPED = record(200, "preempted", outcome="stopped")
UNSAVED = record(200, "preempted", outcome="stopped", step=None)
TRACEBACK = record(70, "user_code", message="ValueError: bad label")
PULLING = pod(0, phase="Pending", **waiting("ImagePullBackOff", "Back-off pulling image"))
CREATING = pod(0, phase="Pending", **waiting("ContainerCreating"))
REPLACED = ended_pod(0, 201, name="old")
COMPLETED = [ended_pod(0, 0, "Completed"), ended_pod(1, 0, "Completed")]
ASKED = config_map(asked="suspended")
TRAINING = {FIRST: report(), SECOND: report(ranks=(1,))}
KEPT_ALIVE = {FIRST: report("succeeded"), SECOND: report("succeeded")}
SMALLER = {FIRST: report(generation=2)}
MEETING = {FIRST: report("rendezvous")}


def test_a_pod_that_stands_by_is_no_node_of_the_group() -> None:
    third = "digits-2-abcde"
    found = look(
        pods=[*BOTH, pod(2)],
        reports={**TRAINING, third: report("standby", generation=0, ranks=())},
        reported=config_map(standby=1),
    )
    assert (found.phase, found.reason, str(found.nodes)) == (Phase.RUNNING, "", "2/2")
    assert {each.name: each.state for each in found.pods}[third] == "Standby"


@pytest.mark.parametrize("seconds", [20, 500])
def test_of_agents_that_nobody_has_asked_it_says_that_nothing_is_known(seconds: int) -> None:
    now = NOW.timestamp() - 500 + seconds
    known = [look(skipped=unasked, taken=now).message for unasked in range(3)]
    assert (
        known[0]
        == known[1]
        == {
            20: "the agents load torch",
            500: "its pods run, but their agents cannot be reached from here",
        }[seconds]
    )
    assert "is not known yet" in known[2]
    assert "not known" not in look(reports=TRAINING, skipped=1, taken=now).message


SILENT_NODE = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}


def stopped_pod(index: int) -> dict[str, Any]:
    """A pod whose training was stopped on request."""
    return ended_pod(index, 200, record=STOPPED)


def look(
    state: WorkloadState | None = ACTIVE,
    pods: list[Any] = BOTH,
    reports: dict[str, Any] | None = None,
    *,
    reported: dict[str, Any] | None = None,
    over: dict[str, Any] | None = None,
    **more: Any,
) -> JobStatus:
    """The status of a job of two nodes."""
    over = workload() if over is None and state else over
    seen = Snapshot(
        "digits",
        config_map=reported or config_map(),
        workload=over,
        state=state,
        pods=pods,
        reports=reports or {},
        **{"taken": NOW.timestamp(), **more},
    )
    return seen.status


@pytest.mark.parametrize(
    ("status", "phase", "reason"),
    [
        (look(reports=TRAINING), Phase.RUNNING, ""),
        (look(reports={FIRST: report("checkpointing")}), Phase.RUNNING, ""),
        (look(reports={FIRST: report("rendezvous", **FRESH)}), Phase.STARTING, "Rendezvous"),
        (look(reports={FIRST: report("initializing", **FRESH)}), Phase.STARTING, "Initializing"),
        (look(reports={FIRST: report("rendezvous", generation=2)}), Phase.RECOVERING, "Rendezvous"),
        (look(reports={FIRST: report("restarting")}), Phase.RECOVERING, "Restarting"),
        (look(reports={FIRST: report("hung")}), Phase.RECOVERING, "Hang"),
        (look(reports={FIRST: report("succeeded")}), Phase.RUNNING, "Finishing"),
        (look(reports=KEPT_ALIVE), Phase.SUCCEEDED, "KeptAlive"),
        (look(reports={FIRST: report("failed", exit=TRACEBACK)}), Phase.FAILED, "user_code"),
        (look(), Phase.RUNNING, "NoAnswer"),
        (look(pods=[]), Phase.PENDING, "NoPods"),
        (look(pods=[unscheduled(0, "0/3 nodes are available")]), Phase.PENDING, "Unschedulable"),
        (look(pods=[PULLING, CREATING]), Phase.PENDING, "ImagePullBackOff"),
        (look(pods=[CREATING]), Phase.STARTING, "ContainerCreating"),
        (look(pods=[lost_pod(0), lost_pod(1)]), Phase.RECOVERING, "NodeLost"),
        (look(pods=[pod(0), lost_pod(1)], reports=SMALLER), Phase.RUNNING, "NodeLost"),
        (
            look(pods=[pod(0), pod(1)], nodes={"worker-1": SILENT_NODE}),
            Phase.RECOVERING,
            "NodeLost",
        ),
        # After an outage of its own the control plane takes readiness away from pods that are well.
        (look(pods=[lost_pod(0), lost_pod(1)], reports=TRAINING), Phase.RUNNING, ""),
        (look(pods=[REPLACED, pod(0)], reports=MEETING), Phase.RECOVERING, "Rendezvous"),
        (look(DONE, COMPLETED), Phase.SUCCEEDED, ""),
        (look(DONE, []), Phase.SUCCEEDED, ""),
        (look(FAILED, [ended_pod(0, 70, record=TRACEBACK)]), Phase.FAILED, "user_code"),
        (look(FAILED, []), Phase.FAILED, "PodFailurePolicy"),
        (look(FAILED, [stopped_pod(0), stopped_pod(1)]), Phase.STOPPED, "Stopped"),
        (look(FAILED, [stopped_pod(0), ended_pod(1, 137)]), Phase.FAILED, "PodFailurePolicy"),
        (look(SUSPENDED, []), Phase.SUSPENDED, "Suspended"),
        (look(SUSPENDED, [], reported=ASKED), Phase.SUSPENDED, "Suspended"),
        (look(SUSPENDED, BOTH, reported=ASKED), Phase.RUNNING, "Suspending"),
        (look(SUSPENDED, [], over=QUEUED), Phase.QUEUED, "Queued"),
        (look(SUSPENDED, [], over=QUEUED, reported=ASKED), Phase.SUSPENDED, "Suspended"),
        (look(None, []), Phase.UNKNOWN, "NoWorkload"),
    ],
)
def test_the_phase_and_its_reason_are_found(status: JobStatus, phase: Phase, reason: str) -> None:
    assert (status.phase, status.reason) == (phase, reason)


def test_the_throughput_is_that_of_all_agents() -> None:
    """Each says what its own ranks do; of a copy that spans nodes, only one of them has something
    to say.
    """
    one = report(ranks=(1,), samples_per_second=500.0)
    assert look(reports={FIRST: report(), SECOND: one}).throughput == 1500.0
    assert look(reports={FIRST: report(samples_per_second=None), SECOND: one}).throughput == 500.0
    assert look(reports={FIRST: report(samples_per_second=None)}).throughput is None
    senseless = report(samples_per_second=float("nan"))
    assert look(reports={FIRST: senseless, SECOND: one}).throughput == 500.0


def test_the_numbers_are_those_of_the_newest_group() -> None:
    old = report(generation=1, step=900, loss=9.0)
    new = report(ranks=(0,), generation=2, step=110, last_checkpoint_step=100)
    status = look(reports={FIRST: old, SECOND: new})
    assert status.step == 110
    assert status.loss == 0.25
    assert status.generation == 2
    assert status.last_checkpoint_step == 100
    assert [(rank.rank, rank.pod) for rank in status.ranks] == [(0, SECOND)]


def test_what_another_run_says_is_not_believed() -> None:
    status = look(reports={FIRST: report(run_id="0000beef", step=9999)})
    assert (status.step, status.ranks) == (None, ())


def test_a_finished_job_still_reports_its_last_step_and_how_it_ended() -> None:
    done = record(0, None, outcome="done", step=500, rank=None)
    status = look(DONE, [ended_pod(0, 0, "Completed"), ended_pod(1, 0, "Completed", done)])
    assert status.exit_record is not None
    assert (status.step, status.exit_record.outcome) == (500, "done")


def test_the_failure_that_decides_is_reported_and_not_what_followed_from_it() -> None:
    printed = "Connection closed by peer"
    peers = record(201, "node_lost", message=printed, primary=False, time=NOW.timestamp() - 60)
    status = look(FAILED, [ended_pod(0, 201, record=peers), ended_pod(1, 70, record=TRACEBACK)])
    assert status.exit_record is not None
    assert (status.exit_record.cause, status.message) == ("user_code", "ValueError: bad label")


def test_an_outcome_that_was_noted_outlives_the_pods() -> None:
    kept_alive = {
        **workload(kind="StatefulSet"),
        "metadata": {"name": "digits", "annotations": {"kdist.dev/outcome": json.dumps(TRACEBACK)}},
    }
    status = look(FAILED, [], over=kept_alive)
    assert (status.phase, status.reason, status.step) == (Phase.FAILED, "user_code", 42)


def test_nodes_at_work_are_counted_against_those_wanted() -> None:
    status = look(
        pods=[pod(0), lost_pod(1), unscheduled(2, "")],
        reported=config_map(least=1, most=4),
        reports={FIRST: report()},
    )
    assert (str(status.nodes), status.nodes.min) == ("1/4", 1)
    assert status.reason == "NodeLost"


def test_a_status_is_plain_for_programs() -> None:
    document = look(reports={FIRST: report(loss="nan")}).to_document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["apiVersion"] == "cli.kdist.dev/v1"
    assert document["phase"] == "Running"
    assert document["loss"] == "nan"
    assert document["ranks"][0]["allReduceSeconds"] == 0.02
    assert document["terminal"] is False


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([None, None], "whether it has saved anything is not known"),
        ([UNSAVED, UNSAVED], "whether it has saved anything is not known"),
        ([UNSAVED, {**STOPPED, "step": 1064}], "step 1,064 is saved"),
    ],
)
def test_of_a_job_that_was_stopped_only_what_is_known_is_called_saved(
    records: list[Any], said: str
) -> None:
    pods = [ended_pod(index, 200, record=one) for index, one in enumerate(records)]
    assert look(FAILED, pods).message == f"stopped on request; {said}"


def test_the_time_left_follows_from_the_pace_of_recent_steps() -> None:
    history = StepHistory()
    assert history.seconds_left(0.0, 100, max_age=10) is None
    history.record(0.0, 10, 1.0)
    assert history.seconds_left(0.0, 100, max_age=10) is None
    history.record(5.0, 20, 0.5)
    assert history.seconds_left(5.0, 100, max_age=10) == 40.0
    assert history.seconds_left(5.0, None, max_age=10) is None
    assert history.seconds_left(16.0, 100, max_age=10) is None


def test_a_rollback_discards_the_pace_and_keeps_the_losses() -> None:
    history = StepHistory()
    history.record(0.0, 10, 1.0)
    history.record(1.0, 20, 0.5)
    history.record(2.0, 5, 0.9)
    assert history.seconds_left(2.0, 100, max_age=10) is None
    assert list(history.losses) == [1.0, 0.5, 0.9]


def test_repeated_steps_and_unknown_or_infinite_losses_add_no_point_to_the_curve() -> None:
    history = StepHistory()
    history.record(0.0, None, 1.0)
    history.record(1.0, 10, 1.0)
    history.record(2.0, 10, 0.5)
    history.record(3.0, 20, math.nan)
    history.record(4.0, 30, None)
    assert list(history.losses) == [1.0]
