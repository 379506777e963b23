"""Ranks that have differed after a recovery in place do not do so again with the same code."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from kdist_trainer.agent.coordination import Generation
from kdist_trainer.agent.restart_policy import RestartLedger, SingleStart
from kdist_trainer.config import Cause, Exit
from kdist_trainer.config.train_config import RESTARTS
from kdist_trainer.ipc.failure import Failure
from tests.trainer.agent.test_restart_policy import AGENTS, MANAGED, Job, killed


def differ(generation: int) -> Failure:
    found = "ReplicasDifferError: rank 1 holds other weights"
    lost = Failure(Cause.RETRY, Exit.RETRY, True, found, 0, "node-0", generation, 5, time.time())
    return replace(lost, signature="replicas-differ")


def test_after_ranks_have_differed_none_continues_in_place_until_the_code_is_another_one(
    tmp_path: Path,
) -> None:
    def begin(job: Job, code: str) -> Generation:
        return RestartLedger(
            job.agent_store,
            checkpoints=tmp_path,
            limits={RESTARTS: 9},
            single_start=SingleStart(MANAGED, job.agent_store),
            code=code,
        ).open_generation(AGENTS, world_size=2)

    job = Job(tmp_path)
    assert begin(job, "first").continues_in_place
    job.agent_store.post_failures(1, [differ(1)])
    assert not begin(job, "first").continues_in_place
    job.agent_store.post_failures(2, [killed(2)])
    assert not begin(job, "first").continues_in_place, "it is not forgotten"
    job.forget_store()
    assert not begin(job, "first").continues_in_place, "the same code, started again"
    job.forget_store()
    assert begin(job, "mended").continues_in_place


def test_ranks_that_an_earlier_version_saw_differ_are_not_trusted(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.open()
    job.ledger().append_event("failure", generation=1, signature="replicas-differ", cause="retry")
    job.agent_store.post_failures(1, [killed(1)])
    assert not job.open().continues_in_place
