"""Ranks are told what saves and losses of their run were."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kdist_trainer.checkpoint.interval import HISTORY_VARIABLE, SaveHistory
from kdist_trainer.checkpoint.ledger import StepLedger
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from tests.trainer.agent.test_restart_policy import Job, job, killed, train

__all__ = ["job"]


def test_a_run_that_was_down_after_the_loss_of_all_its_nodes_has_not_trained_meanwhile(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    now = time.time()
    job.open()
    events = tmp_path / "ledger" / "events.jsonl"
    begun = parse_json(events.read_text())
    events.write_text(encode_json({**begun, "time": now - 3605}) + "\n")
    train(job, 1, began=now - 3600)
    steps = StepLedger(tmp_path)
    steps.append([{"step": 1}])
    steps.close()
    os.utime(tmp_path / "ledger" / "steps.jsonl", (now, now - 3500))
    second = job.open({"node-0": "later"})
    assert second.cause == "node_lost"
    assert second.unsaved_seconds == pytest.approx(100, abs=1)
    history = SaveHistory.from_text(second.save_history)
    assert history.losses == pytest.approx((100,), abs=1)


def test_the_next_group_is_told_of_the_losses_that_went_back_to_a_checkpoint(job: Job) -> None:
    assert SaveHistory.from_text(job.open().environment[HISTORY_VARIABLE]) == SaveHistory()
    now = time.time()
    train(job, 1, began=now - 90)
    job.ledger().append_event("commit", step=4, seconds=2.0, visible_seconds=0.5, time=now - 60)
    job.agent_store.post_failures(1, [replace(killed(1), time=now - 50)])
    second = SaveHistory.from_text(job.open().save_history)
    assert second.losses == pytest.approx((40,), abs=0.2)
    assert (second.since, second.cost, second.duration) == (0.0, 0.5, 2.0)
    train(job, 2, began=now - 30)
    job.agent_store.post_kept_step(2, 17)
    job.agent_store.post_failures(2, [replace(killed(2), time=now - 10)])
    third = SaveHistory.from_text(job.open().save_history)
    assert third.losses == second.losses, "in place nothing is lost"
    assert third.since == pytest.approx(20, abs=0.2)
