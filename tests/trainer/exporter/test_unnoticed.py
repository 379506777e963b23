"""A real training does not notice its exporter: scraped by a hundred, its reader stopped, half of its records lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.config import Nodes, TrainConfig, Training
from tests.trainer.exporter.scrape import fetch, read, total, value, wait_until

STEPS = 400
PATIENCE = 240.0
pytestmark = pytest.mark.processes


class TrainingRun:
    """An agent of two ranks that trains digits, and what it leaves behind."""

    def __init__(self, home: Path) -> None:
        self.checkpoints = home / "checkpoints"
        self.scratch = home / "node-0"
        self.log = home / "log"
        training = Training(workload="digits", steps=STEPS, global_batch=64)
        nodes = Nodes(min=1, max=1)
        config = TrainConfig(name="digits", nodes=nodes, procs_per_node=2, train=training, metrics_linger_seconds=600)
        (home / "train.json").write_text(config.to_json())
        command = [sys.executable, "-m", "kdist_trainer", "--config", str(home / "train.json"), "--run-id", "r", "--port", "0"]
        command += ["--node", "node-0", "--scratch", str(self.scratch), "--rendezvous", f"file:{home / 'store'}"]
        with self.log.open("wb") as log:
            self.agent = subprocess.Popen(
                [*command, "--checkpoints", str(self.checkpoints)], stdout=log, stderr=log, start_new_session=True
            )

    def wait_for_step(self, step: int) -> None:
        """Return once the ledger has the line of this step."""
        wait_until(lambda: self.agent.poll() is not None or self.last_step() >= step, PATIENCE)
        assert self.agent.poll() is None, self.log.read_text()[-4000:]

    def last_step(self) -> int:
        return int(self.losses()[-1][0]) if self.losses() else 0

    def losses(self) -> list[tuple[int, str]]:
        """Step and loss, to the bit, of every line of the ledger."""
        if not (self.checkpoints / "ledger" / "steps.jsonl").exists():
            return []
        return [(line["step"], line["loss"]) for line in RunLedger(self.checkpoints).read_steps()]

    def wait_for_end(self) -> dict[str, Any]:
        """The DONE document, once it is there."""
        wait_until(lambda: self.agent.poll() is not None or self.status()["state"] == "succeeded", PATIENCE)
        assert self.agent.poll() is None, self.log.read_text()[-4000:]
        document: dict[str, Any] = json.loads((self.checkpoints / "DONE").read_text())
        return document

    def port(self) -> int:
        wait_until(lambda: self.agent.poll() is not None or (self.scratch / "agent.json").exists(), PATIENCE)
        return int(json.loads((self.scratch / "agent.json").read_text())["port"])

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(fetch(self.port(), "/status")[1])
        return document


@contextmanager
def training(home: Path) -> Iterator[TrainingRun]:
    run = TrainingRun(home)
    try:
        yield run
    finally:
        os.killpg(run.agent.pid, signal.SIGKILL)
        run.agent.wait()


def scrape_by_a_hundred(port: int, ended: threading.Event) -> list[threading.Thread]:
    """A hundred clients that scrape without a pause until `ended` is set."""

    def scrape() -> None:
        while not ended.is_set():
            assert fetch(port, "/metrics")[0] == 200

    threads = [threading.Thread(target=scrape, daemon=True) for _ in range(100)]
    for thread in threads:
        thread.start()
    return threads


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[int, str]]]:
    """Digest of the weights, and the losses, of a training that nobody looks at."""
    with training(tmp_path_factory.mktemp("undisturbed")) as run:
        return str(run.wait_for_end()["weights"]), run.losses()


def test_the_training_is_the_same_to_the_bit_however_its_exporter_fares(
    tmp_path: Path, undisturbed: tuple[str, list[tuple[int, str]]]
) -> None:
    started = time.monotonic()
    with training(tmp_path) as run:
        port = run.port()
        listening = time.monotonic()
        ended = threading.Event()
        run.wait_for_step(1)
        clients = scrape_by_a_hundred(port, ended)
        run.wait_for_step(40)
        ended.set()
        for client in clients:
            client.join()
        run.agent.send_signal(signal.SIGSTOP)
        os.waitpid(run.agent.pid, os.WUNTRACED)
        stopped_at = run.last_step()
        run.wait_for_step(min(stopped_at + 150, STEPS - 50))
        run.agent.send_signal(signal.SIGCONT)
        done = run.wait_for_end()
        assert (done["weights"], run.losses()) == undisturbed
        youngest = time.monotonic() - listening
        text = fetch(port, "/metrics")[1]
        samples = read(text)
        oldest = time.monotonic() - started
        check_promtool_finds_nothing(text)
    check_totals_are_exact(samples)
    assert total(samples, "kdist_exporter_records_dropped_total") > 0
    assert youngest * 0.99 <= total(samples, "kdist_wall_seconds_total") <= oldest * 1.01


def check_totals_are_exact(samples: dict[Any, float]) -> None:
    for rank in ("0", "1"):
        assert value(samples, "kdist_steps_total", rank=rank) == STEPS
    assert total(samples, "kdist_samples_total") == STEPS * 64
    assert value(samples, "kdist_step_duration_seconds_count") == 2 * STEPS
    assert value(samples, "kdist_last_step") == value(samples, "kdist_target_steps") == STEPS
    spent = total(samples, "kdist_step_phase_seconds_total")
    assert spent == pytest.approx(value(samples, "kdist_step_duration_seconds_sum"), rel=0.01)
    assert total(samples, "kdist_collectives_total") == value(samples, "kdist_allreduce_duration_seconds_count") >= 2 * STEPS
    assert total(samples, "kdist_collective_bytes_total") > 0
    assert value(samples, "kdist_job_state", state="succeeded") == 1
    assert value(samples, "kdist_world_size") == 2
    assert value(samples, "kdist_checkpoint_last_success_step") == STEPS


def check_promtool_finds_nothing(text: str) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
