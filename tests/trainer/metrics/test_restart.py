"""The metrics of a real training that loses a worker: they show the failure, and no counter goes
back.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kdist_trainer.processes.liveness import Heartbeat
from kdist_trainer.tensorboard import FOLDER
from tests.trainer.metrics.scrape import Samples, counters, fetch, read, total, value, wait_until
from tests.trainer.metrics.training import PATIENCE, training
from tests.trainer.tensorboard.drawn import steps

pytestmark = pytest.mark.processes


@pytest.mark.sampled
def test_a_killed_worker_shows_in_the_metrics_and_no_counter_goes_back(tmp_path: Path) -> None:
    shown: Samples = {}
    with training(tmp_path, steps=150, checkpoint_steps=40, recovery="restart") as run:
        port = run.port()

        def look() -> Samples:
            samples = read(fetch(port, "/metrics")[1])
            assert [
                key for key, number in counters(samples).items() if number < shown.get(key, 0)
            ] == []
            shown.update(counters(samples))
            return samples

        def has_ended() -> bool:
            assert run.agent.poll() is None, run.log.read_text()[-4000:]
            return value(look(), "kdist_job_state", state="succeeded") == 1

        wait_until(lambda: look().get(("kdist_last_step", frozenset()), 0) >= 55, PATIENCE)
        os.kill(Heartbeat(run.scratch / "rank-1.heartbeat").read().pid, signal.SIGKILL)
        wait_until(has_ended, PATIENCE, every=0.1)
        samples = look()
    lost = value(samples, "kdist_lost_steps_total")
    assert lost >= 15
    assert value(samples, "kdist_lost_progress_seconds_total") > 0
    assert 150 <= value(samples, "kdist_steps_total", rank="0") <= 150 + lost
    assert value(samples, "kdist_worker_group_restarts_total", cause="signal") == 1
    assert total(samples, "kdist_worker_exits_total", signal="SIGKILL") >= 1
    assert value(samples, "kdist_worker_exits_total", cause="done", signal="none") == 2
    assert value(samples, "kdist_generation") == 2
    drawn = steps(tmp_path / "checkpoints" / FOLDER)
    assert drawn == sorted(set(drawn)), "TensorBoard draws the steps that were done again once"
    assert drawn[0] == 1
    assert drawn[-1] > 55
    assert value(samples, "kdist_checkpoint_attempts_total", op="restore") >= 1
    assert value(samples, "kdist_time_to_recover_seconds") > 0
    assert value(samples, "kdist_wall_seconds_total", category="restart") > 0
    productive = value(samples, "kdist_wall_seconds_total", category="productive_step")
    # the ranks' steps differ a little; counted twice, the lost ones would be a tenth of all
    assert productive <= value(samples, "kdist_step_duration_seconds_sum") / 2 * 1.07, (
        "no second is counted twice"
    )
