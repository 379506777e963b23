"""Alerts meet the faults that they are for: a real Prometheus sees a real training fall ill, fires,
and sees it well again.

The rule files are the chart's; only `for` is shorter. Those that need a pod (a volume, a probe) are
tried on the cluster.
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

from kdist.dashboards.prometheus import Prometheus
from tests.charts.monitored import Training, firing, scraping, until, write_job
from tests.charts.rules import hasten
from tests.cli.running import Run
from tests.house.tree import ROOT

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

SICK = ROOT / "tests" / "cluster" / "src" / "sick.py"
Start = Callable[..., "Patient"]


class Patient:
    """A training of two ranks that falls ill when told to, and the Prometheus that watches it."""

    def __init__(self, home: Path, run: Run, training: Training, prometheus: Prometheus) -> None:
        self.flags = home / "flags"
        self._run = run
        self.training = training
        self._prometheus = prometheus

    def fires(self, alert: str) -> bool:
        """Whether Prometheus says that this alert fires for the job."""
        with suppress(OSError):
            self.training.tell_targets()
        return (alert, "digits") in firing(self._prometheus)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 240) -> None:
        """Return once the condition holds; meanwhile Prometheus hears of agents that have
        started.
        """
        until(
            lambda: self.fires("") or condition(), f"{what}\n{self._run.errors()[-2000:]}", seconds
        )

    def until_it_fires(self, alert: str, seconds: float = 240) -> None:
        self.until(lambda: self.fires(alert), alert, seconds)

    def until_it_is_silent(self, alert: str, seconds: float = 240) -> None:
        self.until(lambda: not self.fires(alert), f"end of {alert}", seconds)

    def until_steps(self, least: int) -> None:
        """Return once Prometheus has seen so many steps."""
        self.until(
            lambda: self._prometheus.instant(f"kdist_last_step >= {least}", at=time.time()),
            f"step {least}",
        )

    def until_at_work(self, groups: int) -> None:
        """Return once so many groups have made a step."""
        self.until(
            lambda: len(self.training.events("first_step")) >= groups, f"group {groups} at work"
        )

    def wait(self, code: int) -> None:
        """Return once the run has ended, with this code."""
        self.until(lambda: self._run.process.poll() is not None, "end of the run")
        self._run.wait(code)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Begin a training of the workload that can be made ill; `train` and further fields of its spec
    are as given.
    """
    runs: list[Run] = []
    with scraping(tmp_path, hasten(tmp_path)) as (prometheus, targets):

        def begin(*, train: dict[str, Any], **spec: Any) -> Patient:
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
            yield begin
        finally:
            for run in runs:
                run.close()


def test_kills_in_a_loop_are_told_until_a_later_checkpoint_is_kept(start: Start) -> None:
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
def test_a_rank_that_stands_still_is_told_until_it_goes_on(start: Start) -> None:
    patient = start(train={}, hangTimeoutSeconds=3600, collectiveTimeoutSeconds=3600)
    patient.until_steps(20)
    patient.training.kill_rank(number=signal.SIGSTOP)
    stopped = time.monotonic()
    patient.until_it_fires("KdistTrainingStalled", 300)
    assert time.monotonic() - stopped > 115
    patient.training.kill_rank(number=signal.SIGCONT)
    patient.until_it_is_silent("KdistTrainingStalled")


@pytest.mark.wide
def test_a_slow_rank_is_told_until_it_is_as_quick_as_the_others(start: Start) -> None:
    patient = start(train={})
    patient.until_steps(20)
    assert not patient.fires("KdistStraggler")
    (patient.flags / "slow").touch()
    patient.until_it_fires("KdistStraggler")
    (patient.flags / "slow").unlink()
    patient.until_it_is_silent("KdistStraggler", 400)


@pytest.mark.wide
def test_a_loss_that_is_none_is_told_though_it_ends_the_training_and_for_ten_minutes(
    start: Start,
) -> None:
    patient = start(train={})
    patient.until_steps(20)
    (patient.flags / "nan").touch()
    patient.wait(10)
    patient.until_it_fires("KdistLossNotFinite", 30)
    told = time.monotonic()
    patient.until_it_is_silent("KdistLossNotFinite", 900)
    assert time.monotonic() - told > 500
