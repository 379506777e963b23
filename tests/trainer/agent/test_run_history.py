"""What a run has come to is in its events, whichever agents were killed."""

from __future__ import annotations

from pathlib import Path

from kdist_trainer.checkpoint.ledger import StepLedger
from tests.trainer.agent.test_restart_policy import Job, killed


def test_a_generation_knows_what_the_run_has_come_to_whoever_has_counted_it(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    first = job.open()
    assert (first.total_restarts, first.total_lost_steps, first.committed_step) == (0, 0, None)
    steps = StepLedger(tmp_path)
    steps.append({"step": number, "generation": 1} for number in range(1, 31))
    (tmp_path / "step-00000010-e1").mkdir()
    (tmp_path / "step-00000010-e1" / "manifest.json").write_bytes(b"{}")
    job.ledger().append_event("commit", step=10, time=1234.5)
    second = job.open({"node-0": "killed", "node-1": "killed too"})
    assert second.lost_steps == 20, "no agent that could tell is left"
    assert (second.total_restarts, second.total_lost_steps) == (1, 20)
    assert (second.committed_step, second.committed_at) == (10, 1234.5)
    steps.append({"step": number, "generation": 2} for number in range(11, 16))
    job.forget_store()
    third = job.open()
    assert (third.reason, third.lost_steps) == ("resume", 5), "its stop could not save"
    assert (third.total_restarts, third.total_lost_steps) == (1, 25)
    job.agent_store.post_kept_step(3, 99)
    job.agent_store.post_failures(3, [killed(3, step=99)])
    fourth = job.open()
    assert (fourth.total_restarts, fourth.total_lost_steps) == (2, 25), "a rank has kept its state"


def test_restarts_that_are_no_longer_in_the_ledger_stay_counted(tmp_path: Path) -> None:
    job = Job(tmp_path)
    event = job.ledger().append_event
    event("generation", generation=7, reason="failure", from_step=0)
    assert job.open().total_restarts == 1, "of a version that wrote no totals"
    event("generation", generation=9, reason="failure", total_restarts=3000, total_lost_steps=5)
    event("generation", generation=10, reason="failure", from_step=0)
    assert job.open().total_restarts == 3001
