"""The restart ledger of group rank 0: numbers, reasons and the limit, whichever agent has that
rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from kdist_trainer.agent.coordination import AgentStore, Generation
from kdist_trainer.agent.restart_policy import (
    RestartLedger,
    SingleStart,
    count_repeats,
    count_restarts,
)
from kdist_trainer.agent.termination import open_generation
from kdist_trainer.causes import BY_NAME
from kdist_trainer.checkpoint.interval import UNSAVED_VARIABLE
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Cause, Exit, Nodes, TrainConfig, Training
from kdist_trainer.config.train_config import MACHINES, RESTARTS
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.object_store.store import ObjectLocation, ObjectPath, ObjectStore
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server, always

AGENTS = {"node-0": "a", "node-1": "b"}
_TRAINING = Training(workload="digits", steps=9)
MANAGED = TrainConfig(name="job", nodes=Nodes(min=1, max=2), train=_TRAINING)
"""A job whose ranks may always be started again."""
NewBook = Callable[..., RestartLedger]


def lost_peer(generation: int, *, step: int = 5) -> Failure:
    return Failure(
        Cause.NODE_LOST,
        Exit.PEERS_LOST,
        False,
        "closed by peer",
        0,
        "node-0",
        generation,
        step,
        time.time(),
    )


def killed(generation: int, *, step: int = 5) -> Failure:
    message = "rank 1 was killed by SIGKILL"
    return Failure(
        Cause.SIGNAL, Exit.PEERS_LOST, True, message, 1, "node-1", generation, step, time.time()
    )


class Job:
    """One run: its store, its checkpoints if it has any, and whoever leads."""

    machine_faults = 10

    def __init__(self, checkpoints: StoragePath | None, max_restarts: int = 3) -> None:
        self.checkpoints = checkpoints
        self.max_restarts = max_restarts
        self.forget_store()

    def forget_store(self) -> None:
        self.agent_store = AgentStore(HashStore(), run_id="run", node="node-0")

    def open(self, agents: dict[str, str] = AGENTS) -> Generation:
        return self.ledger().open_generation(agents, world_size=len(agents))

    def ledger(self) -> RestartLedger:
        return RestartLedger(
            self.agent_store,
            checkpoints=self.checkpoints,
            limits={RESTARTS: self.max_restarts, MACHINES: self.machine_faults},
            single_start=SingleStart(MANAGED, self.agent_store),
        )

    def failure_backoff_seconds(self) -> int:
        ledger = self.ledger()
        return ledger.failure_backoff_seconds(ledger.read_latest_generation())


@pytest.fixture(params=["with checkpoints", "without"])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    return Job(tmp_path if request.param == "with checkpoints" else None)


def test_generations_are_numbered_and_each_says_why_it_began(job: Job) -> None:
    first = job.open()
    assert (first.number, first.reason, first.restarts) == (1, "start", 0)
    job.agent_store.post_failures(1, [lost_peer(1), killed(1)])
    second = job.open()
    assert second.number == 2
    assert second.reason == "failure"
    assert second.restarts == 1
    assert second.cause == "signal"
    job.agent_store.plan_stop(2, "join")
    third = job.open({**AGENTS, "node-2": "c"})
    assert (third.number, third.reason, third.restarts) == (3, "join", 1)
    job.agent_store.plan_stop(3, "stop")
    assert job.open().reason == "resume"


def test_a_job_is_active_anew_once_all_of_its_agents_were_stopped_and_not_after_a_loss(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []
    for now, agents, is_stopped in [
        (100.0, AGENTS, False),
        (200.0, {"node-0": "c", "node-1": "d"}, True),  # both pods were lost
        (300.0, {"node-0": "c", "node-1": "e"}, True),  # one node was drained
        (400.0, {"node-0": "f", "node-1": "g"}, False),  # suspended and resumed
    ]:
        monkeypatch.setattr("kdist_trainer.agent.restart_policy.time.time", lambda now=now: now)
        generation = job.open(agents)
        began.append(generation.active_since)
        if is_stopped:
            job.agent_store.plan_stop(generation.number, "stop")
    assert began == [100, 100, 100, 400]


def test_a_suspended_job_is_active_anew_however_its_stop_is_judged(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_at(now: float, name: str) -> Generation:
        monkeypatch.setattr("kdist_trainer.agent.restart_policy.time.time", lambda: now)
        return job.open({"node-0": name})

    assert open_at(100.0, "a").active_since == 100
    job.agent_store.plan_stop(1, "stop", rank_states=[{"step": -1, "sequence": 0}])
    second = open_at(200.0, "b")
    assert (second.reason, second.active_since) == ("failure", 200), "its ranks started only"
    job.agent_store.plan_stop(2, "stop")
    job.agent_store.post_failures(2, [killed(2)])
    third = open_at(300.0, "c")
    assert (third.reason, third.active_since) == ("failure", 300)
    job.agent_store.plan_stop(3, "deadline")
    assert open_at(400.0, "d").active_since == 300, "nobody has suspended it"


@pytest.mark.parametrize(
    ("stays", "is_asked", "expected"), [(True, True, 100), (False, True, 300), (False, False, 100)]
)
def test_a_save_of_what_one_node_has_kept_leaves_the_time_of_the_job_as_it_is(
    job: Job, monkeypatch: pytest.MonkeyPatch, stays: bool, is_asked: bool, expected: float
) -> None:
    monkeypatch.setattr("kdist_trainer.agent.restart_policy.time.time", lambda: 100.0)
    job.open()
    job.agent_store.post_failures(1, [lost_peer(1)])
    ledger, own = job.ledger(), {"node-0": AGENTS["node-0"]}
    number = open_generation(1, job.agent_store, ledger, agents=own, step=5, is_asked=is_asked)
    assert job.agent_store.generation(number)["active_since"] == 100
    monkeypatch.setattr("kdist_trainer.agent.restart_policy.time.time", lambda: 300.0)
    later = {"node-0": "c", "node-1": AGENTS["node-1"] if stays else "d"}
    assert job.open(later).active_since == expected


def test_the_next_group_is_told_how_much_training_no_checkpoint_holds(job: Job) -> None:
    assert job.open().environment[UNSAVED_VARIABLE] == "0.0"
    now = time.time()
    train(job, 1, began=now - 90)
    job.agent_store.post_failures(1, [replace(killed(1), time=now - 50)])
    second = job.open()
    assert second.unsaved_seconds == pytest.approx(40, abs=0.1)
    assert second.at_risk_seconds == 0, "the ranks begin again"
    train(job, 2, began=now - 30)
    job.agent_store.post_kept_step(2, 17)
    job.agent_store.post_failures(2, [replace(killed(2), time=now - 10)])
    third = job.open()
    assert third.unsaved_seconds == pytest.approx(60, abs=0.1)
    assert third.at_risk_seconds == pytest.approx(20, abs=0.1)
    job.ledger().append_event("commit", step=20, seconds=0.5, time=now - 5)
    train(job, 3, began=now - 4)
    job.agent_store.post_failures(3, [replace(killed(3), time=now - 1)])
    fourth = job.open()
    assert float(fourth.environment[UNSAVED_VARIABLE]) == pytest.approx(3, abs=0.1)


def train(job: Job, generation: int, *, began: float) -> None:
    """The first step of a generation is finished a second after it began."""
    job.ledger().append_event(
        "first_step", generation=generation, step=1, seconds=1.0, time=began + 1
    )


def test_a_leader_that_has_another_disk_reads_the_clock_in_the_rendezvous_store(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path / "first")
    job.open()
    job.checkpoints = tmp_path / "second"
    job.agent_store.post_failures(1, [replace(killed(1), time=time.time() + 30)])
    second = job.open()
    assert second.unsaved_seconds == pytest.approx(30, abs=5)
    job.checkpoints = tmp_path / "third"
    job.agent_store.post_failures(2, [replace(killed(2), time=time.time() + 30)])
    assert job.open().unsaved_seconds == pytest.approx(60, abs=10)


def test_a_commit_below_a_step_that_was_kept_and_lost_is_progress() -> None:
    def group(from_step: int, kept: int | None = None) -> dict[str, Any]:
        kept_step = {} if kept is None else {"kept_step": kept}
        fields = {"event": "generation", "reason": "failure", "from_step": from_step}
        return {**fields, **kept_step}

    lost = [group(0), group(900, 900), group(0), group(0)]
    assert count_restarts(lost).total() == 3
    assert count_restarts([*lost, {"event": "commit", "step": 50}, group(50)]).total() == 1


def test_a_group_is_numbered_while_the_bucket_with_the_ledger_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with S3Server() as server:
        location = ObjectLocation(f"s3://{BUCKET}", server.endpoint, "us-east-1")
        root = ObjectPath(ObjectStore(location, retry_seconds=1)) / "run"
        job = Job(root)
        ledger = job.ledger()
        ledger.open_generation(AGENTS, world_size=2)
        (root / "step-00000007-e1" / "manifest.json").write_bytes(b"{}")
        assert ledger.committed_step() == 7
        job.agent_store.post_failures(1, [killed(1)])
        with server.failing(always("503")):
            second = ledger.open_generation(AGENTS, world_size=2)
            assert (second.number, second.reason) == (2, "failure")
            assert ledger.committed_step() == 7


def test_an_agent_that_is_gone_or_another_now_is_the_one_that_was_lost(job: Job) -> None:
    job.open()
    job.agent_store.post_failures(1, [lost_peer(1, step=8)])
    second = job.open({"node-0": "a", "node-1": "c"})
    assert second.reason == "failure"
    assert second.cause == "node_lost"
    assert second.message == "lost node-1"
    assert second.lost_steps == 8
    third = job.open({"node-0": "a"})
    assert (third.reason, third.message) == ("failure", "lost node-1")


def test_a_first_cause_counts_even_if_a_join_was_planned(job: Job) -> None:
    job.open()
    job.agent_store.plan_stop(1, "join")
    job.agent_store.post_failures(1, [killed(1)])
    assert job.open().reason == "failure"


def test_echoes_of_a_planned_end_cost_nothing(job: Job) -> None:
    job.open()
    job.agent_store.plan_stop(1, "join")
    job.agent_store.post_failures(1, [lost_peer(1)])
    assert (job.open().reason, job.open().restarts) == ("join", 1)


def test_a_node_that_is_lost_while_others_join_is_a_failure(job: Job) -> None:
    job.open()
    job.agent_store.plan_stop(1, "join")
    job.agent_store.post_failures(1, [lost_peer(1)])
    second = job.open({"node-0": "a", "node-1": "c"})
    assert (second.reason, second.cause, second.restarts) == ("failure", "node_lost", 1)


def test_a_leader_that_dies_while_it_opens_a_generation_starts_nothing_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.open()
    job.agent_store.post_failures(1, [killed(1)])
    ledger = job.ledger()
    append_event = ledger.append_event

    def die(event: str, **fields: Any) -> bool:
        if event == "generation":
            raise SystemExit  # as SIGKILL before the ledger was written
        return append_event(event, **fields)

    monkeypatch.setattr(ledger, "append_event", die)
    with pytest.raises(SystemExit):
        ledger.open_generation(AGENTS, world_size=2)
    again = job.open({"node-0": "c", "node-1": "b"})
    assert (again.number, again.reason, again.restarts) == (3, "failure", 1)


def test_one_restart_too_many_is_refused_and_begins_no_generation(job: Job) -> None:
    for number in range(1, 5):
        assert not job.open().exhausted
        job.agent_store.post_failures(number, [killed(number)])
    refused = job.open()
    assert (refused.exhausted, refused.restarts) == (True, 4)
    assert job.agent_store.last_generation() == 4


def test_a_store_that_knows_nothing_of_the_ledgers_last_generation_means_a_new_start(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    job.open()
    job.forget_store()
    again = job.open()
    assert (again.number, again.reason, again.restarts) == (2, "resume", 0)


def test_the_ledger_reports_each_failure_with_its_own_time(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.open()
    failed = killed(1)
    job.agent_store.post_failures(1, [failed])
    job.open()
    (reported,) = (event for event in RunLedger(tmp_path).events() if event["event"] == "failure")
    assert (reported["cause"], reported["rank"], reported["node"], reported["step"]) == (
        "signal",
        1,
        "node-1",
        5,
    )
    assert reported["time"] == pytest.approx(failed.time, abs=0.01)


def test_a_ledger_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file where the folder should be")
    job = Job(tmp_path)
    assert [job.open().number, job.open().number] == [1, 2]


def test_restarts_that_the_ledger_refuses_are_counted_and_slowed_down(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.write_text("a file where the folder should be")
    job = Job(tmp_path, max_restarts=9)
    pauses = []
    for number in range(1, 12):
        pauses.append(job.ledger().storage_backoff_seconds())
        generation = job.open()
        assert (generation.restarts, generation.exhausted) == (number - 1, number == 11)
        job.agent_store.post_failures(number, [killed(number)])
    assert pauses == [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_refused_restarts_and_written_ones_add_up_until_a_step_is_committed(tmp_path: Path) -> None:
    job, ledger, aside = Job(tmp_path), tmp_path / "ledger", tmp_path / "aside"
    job.open()
    job.agent_store.post_failures(1, [killed(1)])
    assert job.open().restarts == 1
    ledger.rename(aside)
    ledger.write_text("a file where the folder should be")
    job.agent_store.post_failures(2, [killed(2)])
    job.open()
    ledger.unlink()
    aside.rename(ledger)
    job.agent_store.post_failures(3, [killed(3)])
    assert job.open().restarts == 3
    (tmp_path / "step-00000005-e1").mkdir()
    RunLedger(tmp_path).append("commit", step=5)
    job.agent_store.post_failures(4, [killed(4)])
    assert job.open().restarts == 1


def test_faults_of_machines_that_the_ledger_refuses_are_counted_apart(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.open()
    ledger, aside = tmp_path / "ledger", tmp_path / "aside"
    ledger.rename(aside)
    ledger.touch()
    job.agent_store.post_failures(1, [broken(1)])
    assert job.open().counts == {MACHINES: 1}
    job.agent_store.post_failures(2, [killed(2)])
    assert job.open().counts == {MACHINES: 1, RESTARTS: 1}


def generation(reason: str) -> dict[str, object]:
    return {"event": "generation", "reason": reason}


def commit(step: int) -> dict[str, object]:
    return {"event": "commit", "step": step}


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([], 0),
        ([generation("start"), generation("failure"), generation("failure")], 2),
        ([generation("start"), generation("failure"), commit(5), generation("failure")], 1),
        ([commit(5), generation("failure"), commit(5), generation("failure")], 2),
        ([commit(5), generation("failure"), commit(4), generation("failure")], 2),
        ([generation("failure"), generation("join"), generation("failure")], 2),
        ([generation(reason) for reason in ("failure", "failure", "resume", "failure")], 1),
    ],
)
def test_progress_and_new_starts_refill_the_budget_and_joins_do_not(
    events: list[dict[str, object]], count: int
) -> None:
    assert count_restarts(events).total() == count


def crashed(generation: int, *, step: int | None, rank: int = 1, lived: float = 5.0) -> Failure:
    message = f"rank {rank} was killed by SIGSEGV"
    return Failure(
        Cause.SIGNAL,
        Exit.PEERS_LOST,
        True,
        message,
        rank,
        "node-0",
        generation,
        step,
        time.time() + lived,
    )


def test_a_crash_that_comes_back_at_the_same_step_ends_the_job_before_its_budget(job: Job) -> None:
    job.max_restarts = 10
    job.open()
    job.agent_store.post_failures(1, [crashed(1, step=5)])
    assert (job.open().repeats, job.failure_backoff_seconds()) == (1, 0)
    job.agent_store.post_failures(2, [crashed(2, step=5, rank=0)])  # whichever rank is the first
    assert job.failure_backoff_seconds() == 1
    assert job.open().exhausted is False
    job.agent_store.post_failures(3, [crashed(3, step=5)])
    assert job.failure_backoff_seconds() == 0, "nothing follows that would have to wait"
    last = job.open()
    assert (last.exhausted, last.repeats, last.restarts) == (True, 3, 3)


def test_failures_that_differ_or_come_from_outside_are_chance_and_slow_down_from_a_third_equal_one(
    job: Job,
) -> None:
    job.max_restarts = 10
    job.open()
    for number, failure in enumerate(
        [killed(1), killed(2), killed(3), crashed(4, step=5), crashed(5, step=6), lost_peer(6)], 1
    ):
        job.agent_store.post_failures(number, [failure])
        assert job.failure_backoff_seconds() == (1 if number == 3 else 0), "the same three times"
        job.max_restarts = number - 1
        assert job.failure_backoff_seconds() == 0, "the restart limit is reached"
        job.max_restarts = 10
        generation = job.open()
        assert generation.exhausted is False
        assert generation.repeats == (failure.message != "rank 1 was killed by SIGKILL")


def broken(generation: int, *, signature: str = "cuda-ecc") -> Failure:
    row = BY_NAME[signature]
    failure = replace(killed(generation), cause=row.cause, fault=row.fault, rerun=row.rerun)
    message = "AcceleratorError: CUDA error: uncorrectable ECC error"
    return replace(failure, signature=signature, message=message)


def test_faults_of_machines_spend_a_limit_of_their_own_however_alike_they_are(job: Job) -> None:
    job.max_restarts, job.machine_faults = 1, 4
    job.open()
    for number in (1, 2, 4, 5):
        job.agent_store.post_failures(number, [broken(number)])
        last = job.open()
        assert (last.exhausted, last.limit) == (False, MACHINES)
        if number == 2:
            job.agent_store.post_failures(3, [killed(3)])
            assert job.open().counts == {MACHINES: 2, RESTARTS: 1}
    assert (last.counts, last.restarts) == ({MACHINES: 4, RESTARTS: 1}, 5)
    assert job.failure_backoff_seconds() == 0, "the limit is reached"
    job.agent_store.post_failures(6, [broken(6)])
    assert job.open().over.startswith(
        "limit of device faults (spec.restart.deviceFaults) reached: 4 restarts without progress; "
        "the last failure: Acc"
    )


def test_a_kernel_that_may_be_the_users_spends_the_jobs_own_limit(job: Job) -> None:
    job.open()
    job.agent_store.post_failures(1, [broken(1, signature="cuda-illegal-access")])
    assert job.open().counts == {RESTARTS: 1}


@pytest.mark.parametrize("signature", ["no-driver", "no-threads", "gloo-interface"])
def test_mistakes_of_the_job_or_its_image_spend_its_own_limit_and_end_it_at_the_third(
    job: Job, signature: str
) -> None:
    job.max_restarts = 10
    for number in (1, 2, 3):
        last = job.open()
        assert (last.exhausted, last.machine_faults) == (False, [])
        job.agent_store.post_failures(number, [broken(number, signature=signature)])
    last = job.open()
    assert (last.exhausted, last.repeats, last.counts) == (True, 3, {RESTARTS: 3})


def test_a_node_that_is_asked_to_end_costs_nothing_once_it_has_trained(job: Job) -> None:
    job.max_restarts = 1
    job.open()
    for number in range(1, 6):
        job.agent_store.plan_stop(number, "stop")
        last = job.open({"node-0": "a", "node-1": f"b{number}"})
        assert (last.exhausted, last.reason, last.counts) == (False, "resume", {})


def test_where_no_step_is_known_the_same_crash_is_one_after_about_the_same_time() -> None:
    def history(*lives: float) -> list[dict[str, object]]:
        events: list[dict[str, object]] = []
        for number, lived in enumerate(lives, 1):
            fields = {"generation": number, "time": 1000.0 * number}
            events.append(
                {**fields, "event": "generation", "reason": "start" if number == 1 else "failure"}
            )
            message = f"rank {number} was killed by SIGSEGV"
            ended = {
                "time": 1000.0 * number + lived,
                "cause": "signal",
                "step": None,
                "message": message,
            }
            events.append({**fields, **ended, "event": "failure"})
        return events

    def last(lived: float) -> Failure:
        return replace(crashed(3, step=None), time=3000.0 + lived)

    assert count_repeats(history(4, 5, 6), last(6)) == 3
    assert count_repeats(history(4, 5, 600), last(600)) == 1, (
        "it got further: it may have checkpoints of its own"
    )
    saved = {"event": "commit", "step": 3}
    assert count_repeats([*history(4, 5), saved, *history(4, 5, 6)[4:]], last(6)) == 1


def test_what_ranks_compute_with_is_written_when_it_changes(job: Job) -> None:
    job.open()
    for torch in ("2.15.0", "2.15.0", "2.16.0"):
        ledger = job.ledger()
        ledger._environment = {"torch": torch}
        ledger.open_generation(AGENTS, world_size=2)
    events = [one for one in job.ledger()._read() if one["event"] == "generation"]
    known = [one.get("environment", {}).get("torch") for one in events]
    assert known == [None, "2.15.0", None, "2.16.0"]
