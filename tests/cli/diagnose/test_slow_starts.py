"""A job that is lost again and again as it starts is told so, with both times and what helps, while
it goes on and after its end.
"""

from __future__ import annotations

from typing import Any

from kdist.diagnose import Diagnosis, diagnose
from tests.cli.diagnose.scenes import FAILED, event, scene
from tests.cli.status.objects import NOW, at, ended_pod, pod, record, report

SLOW = (
    "starting takes longer than the time between losses: the last 4 worker groups were lost 31.0 s "
    "apart, before their first step, and a start takes 48.0 s"
)
FIRST, SECOND = "digits-0-abcde", "digits-1-abcde"
FAILURE = {"cause": "node_lost", "message": "lost digits-1", "time": NOW.timestamp() - 9}
SILENT = [{"rank": 0, "local_rank": 0, "ended": False}]


def look(*reports: dict[str, Any], **more: Any) -> Diagnosis:
    found = dict(zip((FIRST, SECOND), reports, strict=True))
    return diagnose(scene([pod(0), pod(1)], reports=found, **more))


def starting(**more: Any) -> dict[str, Any]:
    return report("initializing", generation=5, step=None, last_failure=FAILURE, **more)


def test_it_is_named_with_both_times_while_the_ranks_start() -> None:
    found = look(starting(slow_start=SLOW), starting(slow_start=SLOW))
    assert (found.cause, found.severity) == ("slow-start", "blocked")
    assert found.sentence == f"{SLOW}; 10 restarts are left, then the job ends"
    assert "nodes that live longer" in found.fix
    assert "train.recovery: inPlace" in found.fix
    assert found.evidence == ("the last loss: node_lost: lost digits-1",)


def test_the_loss_of_the_moment_comes_after_it() -> None:
    gone = event("Killing", "Stopping container trainer", name="digits-1-zzzzz", ago=10)
    late = pod(1)
    late["metadata"]["creationTimestamp"] = at(5)
    reports = {FIRST: report("rendezvous", slow_start=SLOW, last_failure=FAILURE)}
    found = diagnose(scene([pod(0), late], gone, reports=reports))
    assert found.cause == "slow-start"
    assert "pod-lost" in [each.cause for each in found.also]


def test_a_script_that_has_shown_no_step_yet_is_told_it_too() -> None:
    told = report(ranks=(), step=None, slow_start=SLOW, restarts_remaining=1)
    told["ranks"] = SILENT
    found = look(told, told)
    assert found.cause == "slow-start"
    assert "1 restart is left" in found.sentence


def test_it_is_no_more_so_once_ranks_train() -> None:
    assert look(report(), report(slow_start=SLOW)).cause == "none"


def test_the_end_by_the_limit_of_restarts_has_the_same_name_and_both_times() -> None:
    message = f"restart limit reached: 10 restarts without progress; {SLOW}; the last failure: x"
    ended = record(75, "budget", message=message, signature="slow-start")
    found = diagnose(scene([ended_pod(1, 75, record=ended)], state=FAILED))
    assert (found.cause, found.severity) == ("slow-start", "failed")
    assert found.sentence == message
    assert "nodes that live longer" in found.fix
