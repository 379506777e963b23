"""An agent whose work is over for good stays until somebody has its last numbers, where somebody
asks for them at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdist_trainer.agent.exits import failed, success
from kdist_trainer.agent.launch import end, start_exporter
from kdist_trainer.agent.settings import Settings
from kdist_trainer.config import Cause, Exit, Nodes, Script, TrainConfig
from kdist_trainer.ipc.failure import Failure
from kdist_trainer.metrics.exporter import Exporter
from kdist_trainer.processes.signals import StopSignals
from tests.trainer.metrics.scrape import fetch, read, value, wait_until

LONG = 300
NAN = failed(Failure(Cause.NAN, Exit.NONFINITE, True, "the loss of step 7 is nan"))
LOST = failed(Failure(Cause.RENDEZVOUS, Exit.PEERS_LOST, True, "they went away"))


def settings_in(folder: Path, *, linger: int = LONG, grace: int = 60) -> Settings:
    nodes, script = Nodes(min=1, max=1), Script(path="x.py")
    config = TrainConfig(
        name="digits",
        nodes=nodes,
        script=script,
        final_scrape_timeout_seconds=linger,
        termination_grace_period_seconds=grace,
    )
    path = folder / "train.json"
    return Settings(
        config_path=path,
        config=config,
        run_id="r",
        node="node-0",
        scratch=folder,
        rendezvous="file:x",
        port=0,
    )


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    exporter = start_exporter(settings_in(tmp_path), procs=1)
    yield exporter
    exporter.close()


def scrape(exporter: Exporter) -> str:
    """Its metrics, asked for as Prometheus does."""
    accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4"
    return fetch(exporter.port, "/metrics", accept=accept)[1]


class Ending(threading.Thread):
    """An agent that comes to its end, in a thread; `code` is what it ended with."""

    def __init__(self, settings: Settings, record: dict[str, object], exporter: Exporter) -> None:
        super().__init__(daemon=True)
        self._settings = settings
        self._record = record
        self._exporter = exporter
        self.stop = StopSignals()
        self.code = -1
        self.start()

    def run(self) -> None:
        self.code = end(self._settings, self._record, stop=self.stop, exporter=self._exporter)

    def is_over(self) -> bool:
        return not self.is_alive()

    def wait(self) -> int:
        """What it ended with, once it has ended."""
        wait_until(self.is_over)
        return self.code


@pytest.mark.parametrize("record", [NAN, success(step=7)], ids=["failed", "done"])
def test_it_stays_until_its_last_numbers_were_scraped(
    tmp_path: Path, exporter: Exporter, record: dict[str, object]
) -> None:
    scrape(exporter)
    ending = Ending(settings_in(tmp_path), record, exporter)
    wait_until(lambda: exporter.status()["exit"] is not None)
    fetch(exporter.port, "/status")
    fetch(exporter.port, "/metrics")
    assert not ending.is_over()
    state = "succeeded" if record["code"] == 0 else "failed"
    assert value(read(scrape(exporter)), "kdist_job_state", state=state) == 1
    assert ending.wait() == record["code"]


def test_it_goes_at_once_where_nobody_ever_scraped(tmp_path: Path, exporter: Exporter) -> None:
    fetch(exporter.port, "/status")
    fetch(exporter.port, "/metrics", accept="*/*")  # as curl does, and `kdist top` without it
    assert Ending(settings_in(tmp_path), NAN, exporter).wait() == Exit.NONFINITE


def test_it_goes_at_once_where_it_shall_be_tried_again(tmp_path: Path, exporter: Exporter) -> None:
    scrape(exporter)
    assert Ending(settings_in(tmp_path), LOST, exporter).wait() == Exit.PEERS_LOST


def test_it_waits_no_longer_than_the_job_says(tmp_path: Path, exporter: Exporter) -> None:
    scrape(exporter)
    assert Ending(settings_in(tmp_path, linger=1), NAN, exporter).wait() == Exit.NONFINITE


def test_asked_to_stop_it_waits_for_the_grace_at_most_and_asked_twice_no_more(
    tmp_path: Path, exporter: Exporter
) -> None:
    scrape(exporter)
    ending = Ending(settings_in(tmp_path, grace=3600), NAN, exporter)
    wait_until(lambda: exporter.status()["exit"] is not None)
    ending.stop.requested_at = time.monotonic()
    ending.join(0.5)
    assert not ending.is_over(), (
        "the first agent's end has the others stopped, and they have the loss"
    )
    ending.stop.urgent = True
    assert ending.wait() == Exit.NONFINITE


@pytest.mark.parametrize(
    ("record", "requested", "sent"),
    [(NAN, False, [(True, None)]), (NAN, True, []), (LOST, False, [])],
    ids=["ended", "stopped", "tried-again"],
)
def test_the_progress_of_what_has_ended_is_sent_after_the_record_is_written(
    tmp_path: Path,
    exporter: Exporter,
    record: dict[str, object],
    requested: bool,
    sent: list[tuple[bool, object]],
) -> None:
    seen: list[tuple[bool, object]] = []
    status: Any = SimpleNamespace(
        end=lambda: seen.append(((tmp_path / "exit.json").exists(), exporter.status()["exit"]))
    )
    stop = StopSignals()
    stop.requested_at = time.monotonic() if requested else None
    settings = settings_in(tmp_path, linger=1, grace=1)
    end(settings, record, stop=stop, exporter=exporter, status=status)
    assert seen == sent


def test_the_grace_ends_the_wait(tmp_path: Path, exporter: Exporter) -> None:
    scrape(exporter)
    ending = Ending(settings_in(tmp_path, grace=2), NAN, exporter)
    wait_until(lambda: exporter.status()["exit"] is not None)
    ending.stop.requested_at = time.monotonic()
    assert ending.wait() == Exit.NONFINITE
