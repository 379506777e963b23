"""Exit records are read from whatever a termination message holds, and a pod that fetches data says
what it fetches.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.job.goals import describe_status
from kdist.status import ExitRecord, Phase, Snapshot, WorkloadState, read_pod
from kdist.views.status_table import status_rows
from kdist_trainer.agent.exits import failed, stopped, success
from kdist_trainer.config import Cause, Exit
from kdist_trainer.ipc.failure import Failure
from tests.cli.status.objects import (
    NOW,
    RUNS,
    URL,
    Document,
    config_map,
    ended_pod,
    fetching_pod,
    pod,
    record,
    report,
    terminated,
    unscheduled,
    workload,
)

FAILURE = Failure(
    Cause.USER_CODE,
    Exit.USER,
    True,
    'ValueError: ä "quoted"\nsecond line',
    rank=3,
    node="digits-3",
    step=17,
)


@pytest.mark.parametrize(
    "reported", [failed(FAILURE), success(step=500), stopped("stopped on request", step=3)]
)
def test_what_the_trainer_writes_is_read_as_it_was_meant(reported: dict[str, object]) -> None:
    read = ExitRecord.parse(json.dumps(reported, ensure_ascii=False))
    assert read is not None
    assert read.whole
    assert (read.code, read.cause or None, read.outcome, read.step) == (
        reported["code"],
        reported["cause"],
        reported["outcome"],
        reported["step"],
    )
    assert read.message == reported["message"]


def test_a_record_survives_its_way_through_an_annotation() -> None:
    read = ExitRecord.read(record(70, "user_code", traceback=["a", "b"], collective="all_reduce"))
    assert read is not None
    assert ExitRecord.parse(read.to_text()) == read


@pytest.mark.parametrize("length", range(40, 420, 9))
def test_of_a_record_that_was_cut_the_first_fields_are_read(length: int) -> None:
    text = json.dumps(
        record(70, "user_code", message="ValueError: " + "x" * 300, traceback=["line"] * 50)
    )[:length]
    read = ExitRecord.parse(text)
    assert read is not None
    assert (read.code, read.whole) == (70, False)
    assert "user_code".startswith(read.cause)


def test_the_end_of_a_log_reports_it_where_the_message_is_one() -> None:
    event = {
        "time": "2026-01-31T12:00:00.000Z",
        "event": "failed",
        "cause": "data",
        "code": 65,
        "rank": 1,
        "message": "empty",
    }
    read = ExitRecord.parse(f"loading …\nprogress 3%\r\n{json.dumps(event)}\nbye\n")
    assert read is not None
    assert (read.code, read.cause, read.rank, read.message, read.whole) == (
        65,
        "data",
        1,
        "empty",
        False,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "OOM",
        "{",
        "{}",
        "[1]",
        "null",
        '{"code": 70}',
        '{"code": "70", "cause": "x"}',
        '{"code": 1e999, "cause": "x"}',
        "[" * 9000,
    ],
)
def test_what_is_no_record_reads_as_none(text: str) -> None:
    assert ExitRecord.parse(text) is None


@pytest.mark.sampled
@given(st.text() | st.binary().map(lambda data: data.decode(errors="replace")))
def test_any_text_is_taken_calmly(text: str) -> None:
    read = ExitRecord.parse(text)
    assert read is None or 0 <= read.code <= 255


@given(st.data())
def test_a_record_with_any_values_in_it_is_taken_calmly(data: st.DataObject) -> None:
    reported = record(70, "user_code")
    key = data.draw(st.sampled_from(sorted(reported)))
    reported[key] = data.draw(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers())
    )
    read = ExitRecord.parse(json.dumps(reported))
    assert read is None or isinstance(read.message, str)


WAITS: Document = {"state": {"waiting": {"reason": "PodInitializing"}}}
DONE: Document = {"state": terminated(0, "Completed")}
WRONG = record(65, "data", message="spec.data[0]: the SHA-256 of a is b", rank=None, node="")
FAILED: Document = {"state": terminated(65, record=WRONG)}
AWAY = record(203, "storage", message="spec.data[0]: nothing has come for 300 s", rank=None)
BACKS_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}


def see(*pods: Document, **more: Any) -> Snapshot:
    given = {"state": WorkloadState(active=2), "config_map": config_map(), **more}
    return Snapshot(
        name="digits",
        namespace="ml",
        workload=given.pop("workload", workload()),
        pods=pods,
        taken=NOW.timestamp(),
        **given,
    )


@pytest.mark.parametrize(
    ("document", "state"),
    [
        (fetching_pod(0, RUNS), "Init:0/1"),
        (fetching_pod(0, DONE, RUNS, names=("fetch-data-0", "fetch-init")), "Init:1/2"),
        (fetching_pod(0, WAITS), "Init:0/1"),
        (fetching_pod(0, FAILED, phase="Failed"), "Init:Error"),
        (fetching_pod(0, FAILED), "Init:Error"),
        (fetching_pod(0, {"state": BACKS_OFF}), "Init:CrashLoopBackOff"),
        (fetching_pod(0, DONE), "PodInitializing"),
        (pod(0), "Running"),
        (ended_pod(0, 70), "Error"),
    ],
)
def test_the_state_of_a_pod_is_the_one_that_kubectl_shows(document: Document, state: str) -> None:
    assert read_pod(document).state == state


def test_a_sidecar_that_runs_or_was_killed_is_not_what_a_pod_waits_for() -> None:
    document = fetching_pod(0, {**RUNS, "started": True}, RUNS, names=("proxy", "fetch-data-0"))
    document["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    found = read_pod(document)
    assert found.init is not None
    assert found.init.name == "fetch-data-0"
    ended = ended_pod(0, 70)
    killed = {"name": "proxy", "state": terminated(137), "restartCount": 0}
    ended["status"]["initContainerStatuses"] = [killed]
    assert read_pod(ended).init is None


def test_a_pod_that_fetches_starts_and_says_what() -> None:
    status = see(fetching_pod(0, RUNS), fetching_pod(1, WAITS)).status
    assert (status.phase, status.reason) == (Phase.STARTING, "Fetching")
    assert status.message == f"fetching data from {URL} on 1 node"
    assert status.fetch is None


def test_the_node_with_most_to_fetch_says_how_far_the_job_is() -> None:
    def tell(done: int) -> Document:
        return {
            "event": "data-progress",
            "done_bytes": done * 10**9,
            "total_bytes": 200 * 10**9,
            "bytes_per_second": 80e6,
        }

    fetches = {"digits-0-abcde": tell(150), "digits-1-abcde": tell(12)}
    status = see(fetching_pod(0, RUNS), fetching_pod(1, RUNS), fetches=fetches).status
    assert str(status.fetch) == "12 of 200 GB, 80 MB/s"
    assert status.message == f"fetching data from {URL} on 2 nodes"
    assert ("fetched", "12 of 200 GB, 80 MB/s") in status_rows(status)
    assert describe_status(status).endswith(f"from {URL} on 2 nodes, 0 %")
    document = json.loads(json.dumps(status.to_document()))
    assert document["fetch"]["total"] == 200 * 10**9


def test_weights_are_called_weights() -> None:
    status = see(fetching_pod(0, RUNS, names=("fetch-init",))).status
    assert status.message == f"fetching weights from {URL}"


def test_a_pod_that_still_fetches_is_told_while_others_wait_for_it() -> None:
    joined = {"digits-0-abcde": report("rendezvous", ranks=(), step=0, last_checkpoint_step=None)}
    status = see(pod(0), fetching_pod(1, RUNS), reports=joined).status
    assert status.reason == "Rendezvous"
    assert f"; fetching data from {URL} on 1 node" in status.message


def test_a_job_that_failed_says_what_its_init_container_said() -> None:
    over = WorkloadState(failed=1, finished="failed", reason="PodFailurePolicy")
    status = see(fetching_pod(0, FAILED, phase="Failed"), state=over).status
    assert (status.phase, status.reason) == (Phase.FAILED, "data")
    assert status.message == WRONG["message"]
    assert status.exit_record is not None
    assert status.exit_record.code == 65
    assert not status.kept_alive


@pytest.mark.parametrize("last", [{}, {"state": RUNS["state"]}, {"state": BACKS_OFF}])
def test_a_kind_that_never_ends_a_pod_is_ended_when_its_data_cannot_be_fetched(
    last: Document,
) -> None:
    init = {**FAILED, **last, **({"lastState": FAILED["state"]} if last else {})}
    status = see(fetching_pod(0, init), config_map=config_map(backend="statefulset")).status
    assert (status.phase, status.reason, status.kept_alive) == (Phase.FAILED, "data", True)


@pytest.mark.parametrize("end", [terminated(203, record=AWAY), terminated(137, "OOMKilled")])
def test_a_transient_failure_is_no_end(end: Document) -> None:
    status = see(fetching_pod(0, {"state": BACKS_OFF, "lastState": end})).status
    assert not status.phase.terminal
    assert not status.kept_alive


def test_a_pod_without_a_node_fetches_nothing() -> None:
    status = see(unscheduled(0, "0/2 nodes are available")).status
    assert status.reason == "Unschedulable"
