"""Alerts fire at the faults that they are for, and resolve: a real Prometheus scrapes a real
training.

The rule files are the chart's; only `for` is shorter. Alerts that need a pod (a volume, a probe)
are tested on the cluster.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.charts.monitored import Training, firing, scraping, until, write_job
from tests.charts.rules import hasten
from tests.cli.running import Run
from tests.house.tree import ROOT
from tools.dashboards.prometheus import Prometheus

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

SICK = ROOT / "tests" / "cluster" / "src" / "sick.py"
Start = Callable[..., "Patient"]


class Patient:
    """A training of two ranks that fails on command, and the Prometheus that scrapes it."""

    def __init__(self, home: Path, run: Run, training: Training, prometheus: Prometheus) -> None:
        self.flags = home / "flags"
        self._run = run
        self.training = training
        self._prometheus = prometheus

    def fires(self, alert: str) -> bool:
        """Whether this alert fires for the job."""
        with suppress(OSError):
            self.training.write_targets()
        return (alert, "digits") in firing(self._prometheus)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 240) -> None:
        """Wait until the condition holds, and meanwhile write the addresses of new agents for
        Prometheus.
        """
        until(
            lambda: self.fires("") or condition(), f"{what}\n{self._run.errors()[-2000:]}", seconds
        )

    def until_it_fires(self, alert: str, seconds: float = 240) -> None:
        self.until(lambda: self.fires(alert), alert, seconds)

    def until_it_is_silent(self, alert: str, seconds: float = 240) -> None:
        self.until(lambda: not self.fires(alert), f"end of {alert}", seconds)

    def until_steps(self, least: int) -> None:
        """Wait until Prometheus has scraped that many steps."""
        self.until(
            lambda: self._prometheus.instant(f"kdist_last_step >= {least}", at=time.time()),
            f"step {least}",
        )

    def until_at_work(self, groups: int) -> None:
        """Wait until that many worker groups have done a step."""
        self.until(
            lambda: len(self.training.events("first_step")) >= groups, f"group {groups} at work"
        )

    def wait(self, code: int) -> None:
        """Wait until the run has ended, with this code."""
        self.until(lambda: self._run.process.poll() is not None, "end of the run")
        self._run.wait(code)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a training of the workload that fails on command, with these fields of `train` and of
    the spec.
    """
    runs: list[Run] = []
    with scraping(tmp_path, hasten(tmp_path)) as (prometheus, targets):

        def start_training(*, train: dict[str, Any], **spec: Any) -> Patient:
            (tmp_path / "src").mkdir()
            (tmp_path / "flags").mkdir()
            shutil.copy(SICK, tmp_path / "src")
            settings = {
                "code": "./src",
                "env": [{"name": "FLAGS", "value": str(tmp_path / "flags")}],
                **spec,
            }
            calm = {
                "workload": "sick:Sick",
                "globalBatch": 64,
                "syncEverySteps": 2,
                "steps": 100_000,
                **train,
            }
            run = Run(tmp_path, write_job(tmp_path, train=calm, **settings))
            runs.append(run)
            return Patient(tmp_path, run, Training(run, "digits", targets), prometheus)

        try:
            yield start_training
        finally:
            for run in runs:
                run.close()


@pytest.mark.sampled
def test_repeated_kills_fire_an_alert_until_a_later_checkpoint_is_committed(start: Start) -> None:
    patient = start(train={"checkpoint": {"every": {"steps": 120}}}, maxRestarts=20)
    for restart in range(1, 5):
        patient.until_at_work(restart)
        assert not patient.fires("KdistRestartLoop")
        patient.training.kill_rank()
    patient.until_it_fires("KdistRestartLoop")
    patient.until_it_is_silent("KdistRestartLoop")
    assert len(patient.training.events("commit")) >= 2
    assert patient.training.events("generation")[-1]["generation"] == 5


@pytest.mark.wide
def test_a_stopped_rank_fires_an_alert_until_it_continues(start: Start) -> None:
    patient = start(train={}, hangTimeoutSeconds=3600, collectiveTimeoutSeconds=3600)
    patient.until_steps(20)
    patient.training.kill_rank(number=signal.SIGSTOP)
    stopped = time.monotonic()
    patient.until_it_fires("KdistTrainingStalled", 300)
    assert time.monotonic() - stopped > 115
    patient.training.kill_rank(number=signal.SIGCONT)
    patient.until_it_is_silent("KdistTrainingStalled")


@pytest.mark.wide
def test_a_slow_rank_fires_an_alert_until_it_is_as_fast_as_the_others(start: Start) -> None:
    patient = start(train={})
    patient.until_steps(20)
    assert not patient.fires("KdistStraggler")
    (patient.flags / "slow").touch()
    patient.until_it_fires("KdistStraggler")
    (patient.flags / "slow").unlink()
    patient.until_it_is_silent("KdistStraggler", 400)


@pytest.mark.wide
def test_a_loss_that_is_not_finite_fires_an_alert_for_ten_minutes_after_the_training(
    start: Start,
) -> None:
    patient = start(train={})
    patient.until_steps(20)
    (patient.flags / "nan").touch()
    patient.wait(10)
    patient.until_it_fires("KdistLossNotFinite", 30)
    fired = time.monotonic()
    patient.until_it_is_silent("KdistLossNotFinite", 900)
    assert time.monotonic() - fired > 500
