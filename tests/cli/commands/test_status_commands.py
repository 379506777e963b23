"""`kdist status`, `why`, `wait` and `logs` as they are typed, against a server that shows one
job.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from click.testing import Result

from kdist.cluster import transport
from kdist.errors import Code
from tests.cli.cluster.api import Api, write_kubeconfig
from tests.cli.cluster.conftest import Serve, _hurry, serve
from tests.cli.conftest import Kdist
from tests.cli.job.cluster.test_wait import DONE, FAILED
from tests.cli.job.cluster.world import FIRST, SECOND, World, lines
from tests.cli.status.objects import ended_pod, pod, record

__all__ = ["_hurry", "serve"]

PROGRESS = {
    "time": "2026-01-31T12:00:01.500Z",
    "event": "progress",
    "level": "info",
    "rank": 0,
    "step": 5,
    "loss": 0.5,
    "target": 9,
}


@pytest.fixture
def world() -> World:
    """A job that trains."""
    return World()


@pytest.fixture(autouse=True)
def api(world: World, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    """The cluster of the kubeconfig, which shows the world."""
    found = serve(world)
    write_kubeconfig(tmp_path / "kubeconfig", found.url)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return found


def test_a_status_shows_the_job_and_each_rank(kdist: Kdist, world: World) -> None:
    shown = kdist("status", "digits")
    assert shown.exit_code == 0
    assert "phase             Running" in shown.stdout
    assert "step              120/500 (24%)" in shown.stdout
    ranks = [line.split() for line in shown.stdout.split("\n\n")[1].splitlines()]
    assert ranks[0] == [
        "RANK",
        "POD",
        "STATUS",
        "STEP",
        "STEP",
        "TIME",
        "BUSY",
        "ALL-REDUCE",
        "RESTARTS",
        "NODE",
    ]
    assert ranks[1][:4] == ["0", FIRST, "Running", "120"]
    assert len(ranks) == 3


def test_a_status_is_there_for_programs_too(kdist: Kdist, world: World) -> None:
    document = json.loads(kdist("status", "digits", "-o", "json").stdout)
    assert (document["kind"], document["phase"], document["step"]) == ("JobStatus", "Running", 120)
    assert kdist("status", "digits", "-o", "name").stdout == "job/digits\n"


def test_a_watch_without_a_terminal_prints_a_line_for_each_change_until_the_end(
    kdist: Kdist, world: World
) -> None:
    world.workload, world.pods = DONE, [ended_pod(0, 0, "Completed")]
    assert kdist("status", "digits", "-w").stdout == "digits: Succeeded\n"


def test_a_watch_ends_with_the_code_of_the_jobs_end(kdist: Kdist, world: World) -> None:
    world.workload = FAILED
    world.pods = [ended_pod(0, 70, record=record(70, "user_code", message="ValueError: bad label"))]
    assert kdist("status", "digits", "-w").exit_code == 10
    assert kdist("status", "digits", "-w", "-o", "json").exit_code == 10
    assert kdist("status", "digits").exit_code == 0


def test_there_being_no_such_job_is_exit_code_4(kdist: Kdist, world: World) -> None:
    world.config_map, world.workload, world.pods = None, None, []
    for verb in ("status", "why", "wait", "logs"):
        shown = kdist(verb, "digits")
        assert (shown.exit_code, "no job digits in namespace ml" in shown.stderr) == (4, True), verb
    assert kdist("wait", "digits", "--for=deleted").stdout == "digits is deleted\n"


def test_why_prints_cause_evidence_fix_and_next_command(kdist: Kdist, world: World) -> None:
    world.workload = FAILED
    world.pods = [
        ended_pod(
            1, 70, record=record(70, "user_code", message="ValueError: bad", traceback=["line 7"])
        )
    ]
    shown = kdist("why", "digits").stdout.splitlines()
    assert (
        shown[0] == "failed user-code: rank 1 on digits-1-abcde at step 42 raised ValueError: bad"
    )
    assert "  | line 7" in shown
    assert shown[-2:] == [
        "Next: kdist logs digits -n ml --rank 1",
        "  or: do what the fix says, then kdist apply JOB.yaml -n ml && kdist restart digits -n ml",
    ]
    document = json.loads(kdist("why", "digits", "-o", "json").stdout)
    assert document["kind"] == "Diagnosis"
    assert document["cause"] == "user-code"
    assert document["phase"] == "Failed"
    assert kdist("wait", "digits").exit_code == 10


def test_logs_are_reported_in_words_with_the_pod_in_front(kdist: Kdist, world: World) -> None:
    world.logs = {FIRST: lines("hello", json.dumps(PROGRESS)), SECOND: lines("other", at=5)}
    assert kdist("logs", "digits").stdout.splitlines() == [
        "[digits-0] hello",
        "2026-01-31T12:00:01Z digits-0 progress              step 5/9, loss 0.5",
        "[digits-1] other",
    ]
    assert kdist("logs", "digits", "--pod", "1", "--raw").stdout == "[digits-1] other\n"
    assert kdist("logs", "digits", "--rank", "1").stdout == "[digits-1] other\n"
    none = json.loads(kdist("logs", "digits", "--rank", "99", "-o", "json").stdout)
    assert none["lines"] == []
    assert none["warnings"] == ["there is no line of rank 99 in the logs of digits"]


def test_followed_logs_end_with_the_job_and_its_exit_code(kdist: Kdist, world: World) -> None:
    world.logs = {FIRST: lines("a")}
    world.workload, world.pods = FAILED, [ended_pod(0, 70, record=record(70, "user_code"))]
    shown = kdist("logs", "digits", "-f")
    assert (shown.exit_code, shown.stdout) == (10, "[digits-0] a\n")
    assert shown.stderr.endswith("digits: Failed (user_code)\n")


@pytest.mark.parametrize("given", ["x", "3-1", "1,,2", "-1", "failed"])
def test_ranks_that_cannot_be_meant_are_refused(kdist: Kdist, world: World, given: str) -> None:
    world.logs, world.pods = {FIRST: lines("a")}, [pod(0)]
    refused = kdist("logs", "digits", f"--rank={given}")
    assert refused.exit_code == 2
    assert given != "failed" or "Next: kdist why digits -n ml\n" in refused.stderr


def test_the_rank_that_failed_is_found_by_its_record(kdist: Kdist, world: World) -> None:
    world.workload = FAILED
    world.pods = [ended_pod(0, 0), ended_pod(1, 70, record=record(70, "user_code"))]
    begun = {
        "time": "2026-01-31T12:00:00.000Z",
        "event": "worker-started",
        "level": "info",
        "rank": 1,
        "pid": 5,
    }
    world.logs = {FIRST: lines("fine"), SECOND: lines(json.dumps(begun), "boom", at=3)}
    assert kdist("logs", "digits", "--rank", "failed").stdout.splitlines()[-1] == "[digits-1] boom"
    assert "fine" not in kdist("logs", "digits", "--rank", "failed").stdout


def test_logs_are_followed_no_longer_than_asked(kdist: Kdist, world: World) -> None:
    world.logs = {FIRST: lines("one"), SECOND: lines("two")}
    followed = kdist("logs", "digits", "-f", "--timeout", "1s")
    assert followed.exit_code == 6, followed.stderr
    assert "one" in followed.stdout
    assert "digits is Running and has not reached `done` after 1 s" in followed.stderr


STAYING = {
    "logs": ["logs", "digits", "-f"],
    "status": ["status", "digits", "-w"],
    "wait": ["wait", "digits"],
}


def stay(kdist: Kdist, api: Api, *words: str) -> tuple[threading.Thread, list[Result]]:
    """The command in a thread, when it has seen the job's pods; and its result, once it has
    ended.
    """
    found: list[Result] = []
    running = threading.Thread(target=lambda: found.append(kdist(*words)))
    running.start()
    while not any("/proxy/" in each.path for each in api.asked) and running.is_alive():
        running.join(0.01)
    return running, found


@pytest.mark.parametrize("verb", STAYING)
def test_an_outage_is_ridden_out_by_who_stays_with_a_job_and_reported_of(
    kdist: Kdist, world: World, api: Api, serve: Serve, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(transport, "RETRY_SECONDS", 0.05)
    world.logs = {FIRST: lines("one"), SECOND: lines("two")}
    running, found = stay(kdist, api, *STAYING[verb])
    api.close()
    running.join(0.3)
    assert running.is_alive(), found[0].stderr
    world.workload, world.pods = DONE, [ended_pod(0, 0, "Completed"), ended_pod(1, 0, "Completed")]
    serve(world, port=api.port)
    running.join(30)
    assert found[0].exit_code == Code.OK, found[0].stderr
    reported = [line for line in found[0].stderr.splitlines() if "API server" in line]
    assert re.search(r" since \d\d:\d\d:\d\d, trying again until it does$", reported[0])
    assert "the API server answers again" in reported


def test_an_outage_is_ridden_out_no_longer_than_asked(kdist: Kdist, api: Api) -> None:
    running, found = stay(kdist, api, "status", "digits", "-w", "--timeout", "1s")
    api.close()
    running.join(30)
    assert found[0].exit_code == Code.UNREACHABLE
    assert "does not answer" in found[0].stderr
