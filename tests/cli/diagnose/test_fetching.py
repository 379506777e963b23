"""`kdist why` of a job that fetches data before it trains."""

from __future__ import annotations

import pytest

from kdist.diagnose import diagnose
from kdist.status import WorkloadState
from tests.cli.diagnose.scenes import scene
from tests.cli.status.objects import (
    RUNS,
    URL,
    Document,
    fetching_pod,
    pod,
    record,
    report,
    terminated,
)

FAILED = WorkloadState(failed=1, finished="failed", reason="PodFailurePolicy")
MESSAGE = "spec.data[0]: the SHA-256 of a.bin is 1, not 2"


def failing(code: int, cause: str | None, reason: str = "Error", message: str = "") -> Document:
    told = record(code, cause, message=message or MESSAGE, rank=None, node="") if cause else None
    return {"state": terminated(code, reason, told)}


def test_a_wrong_checksum_is_told_with_the_field_the_log_and_what_to_do() -> None:
    seen = scene([fetching_pod(0, failing(65, "data"), phase="Failed"), pod(1)], state=FAILED)
    found = diagnose(seen)
    assert (found.cause, found.severity) == ("fetch", "failed")
    assert found.sentence == f"data from {URL} cannot be fetched: {MESSAGE}"
    assert found.fix == "correct spec.data[0], or what is at its URL, then apply and restart"
    assert found.evidence[0] == "pod/digits-0-abcde: fetch-data-0 ended with exit code 65"
    assert found.commands[0] == "kdist logs digits -n ml -c fetch-data-0 --pod digits-0-abcde"
    assert found.change == "do what the fix says"
    assert found.commands[1:] == ("kdist apply JOB.yaml -n ml && kdist restart digits -n ml",)
    assert found.also == (), "the exit record is the same failure"


@pytest.mark.parametrize(
    ("init", "words", "fix"),
    [
        (failing(64, "config", message="no credential"), "no credential", "correct spec.data[0]"),
        (failing(137, None, "OOMKilled"), "more memory than the limit", "spec.resources.memory"),
        (failing(1, None), "exit code 1 and left no exit record", "rebuild the image"),
    ],
)
def test_what_else_may_be_wrong_has_its_fix(init: Document, words: str, fix: str) -> None:
    found = diagnose(scene([fetching_pod(0, init, phase="Failed")], state=FAILED))
    assert found.cause == "fetch"
    assert words in found.sentence
    assert fix in found.fix


def test_a_server_that_is_away_is_waited_for() -> None:
    told = record(203, "storage", message="spec.data[0]: nothing has come for 300 s", rank=None)
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    again = {"state": waits, "lastState": terminated(203, record=told), "restartCount": 2}
    found = diagnose(scene([fetching_pod(0, again)]))
    assert (found.cause, found.severity) == ("fetch", "waiting")
    assert "could not be fetched, it is tried again: spec.data[0]: nothing" in found.sentence
    assert "restarted 2 times" in found.evidence[0]


def test_a_fetch_in_progress_says_how_far_it_is() -> None:
    event: Document = {"event": "data-progress", "bytes_per_second": 80 * 10**6}
    event |= {"done_bytes": 12 * 10**9, "total_bytes": 200 * 10**9}
    found = diagnose(scene([fetching_pod(0, RUNS)], fetches={"digits-0-abcde": event}))
    assert (found.cause, found.severity) == ("fetching", "waiting")
    assert found.sentence == f"digits starts: fetching data from {URL}: 12 of 200 GB, 80 MB/s"
    assert found.commands[0] == "kdist logs digits -n ml -f -c fetch-data-0"
    unknown = diagnose(scene([fetching_pod(0, RUNS)]))
    assert unknown.sentence == f"digits starts: fetching data from {URL}"


def test_a_node_that_still_fetches_is_why_the_others_wait() -> None:
    joined = {"digits-0-abcde": report("rendezvous", ranks=(), step=0, last_checkpoint_step=None)}
    found = diagnose(scene([pod(0), fetching_pod(1, RUNS)], reports=joined))
    assert found.cause == "fetching"
    assert "rendezvous" not in [each.cause for each in found.also]


def test_a_fetch_that_was_killed_with_its_pod_is_not_the_cause() -> None:
    evicted = fetching_pod(0, failing(137, None), phase="Failed", reason="Evicted")
    found = diagnose(scene([evicted], state=WorkloadState(failed=1)))
    assert found.cause == "evicted"


def test_a_pod_that_fetched_more_than_its_volume_takes_names_the_field() -> None:
    message = 'Usage of EmptyDir volume "data-0" exceeds the limit "1Gi". '
    evicted = pod(0, phase="Failed", reason="Evicted", message=message)
    found = diagnose(scene([evicted], state=WorkloadState(failed=1)))
    assert found.cause == "evicted"
    assert found.fix.startswith("raise spec.data[0].size")
