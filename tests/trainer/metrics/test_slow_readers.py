"""A training is unaffected by its exporter: a hundred scrapers, a stopped reader, lost records."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.metrics.transport import short_address
from tests.trainer.metrics.scrape import fetch, read, total, value, wait_until
from tests.trainer.metrics.training import PATIENCE, training

STEPS = 600
pytestmark = pytest.mark.processes


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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[int, str]]]:
    """Digest of the weights, and the losses, of a training that is not scraped."""
    with training(tmp_path_factory.mktemp("uninterrupted"), steps=STEPS) as run:
        return str(run.wait_for_end()["weights"]), run.losses()


@pytest.mark.sampled
def test_the_training_is_bitwise_identical_whatever_happens_to_its_exporter(
    tmp_path: Path, uninterrupted: tuple[str, list[tuple[int, str]]]
) -> None:
    started = time.monotonic()
    with training(tmp_path, steps=STEPS) as run:
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
        wait_until(lambda: state_of(run.agent.pid) == "T", PATIENCE)
        fill_queue(run.scratch / "metrics.sock")
        stopped_at = run.last_step()
        run.wait_for_step(min(stopped_at + 200, STEPS - 50))
        run.agent.send_signal(signal.SIGCONT)
        done = run.wait_for_end()
        assert (done["weights"], run.losses()) == uninterrupted
        youngest = time.monotonic() - listening
        text = fetch(port, "/metrics")[1]
        samples = read(text)
        oldest = time.monotonic() - started
        check_promtool_finds_nothing(text)
    check_totals_are_exact(samples)
    assert total(samples, "kdist_exporter_records_dropped_total") > 0
    assert youngest * 0.99 <= total(samples, "kdist_wall_seconds_total") <= oldest * 1.01


def fill_queue(path: Path) -> None:
    """Send what is no record to a socket whose reader is stopped, until it takes nothing more."""
    while can_send(path):
        pass


def can_send(path: Path) -> bool:
    """Whether a new socket can send anything; sends as much as it can."""
    sent = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(BlockingIOError):
        sender.setblocking(False)
        with short_address(path) as address:
            sender.connect(address)
        while True:
            sent += sender.send(b"not a record") > 0
    return sent > 0


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def check_totals_are_exact(samples: dict[Any, float]) -> None:
    for rank in ("0", "1"):
        assert value(samples, "kdist_steps_total", rank=rank) == STEPS
    assert total(samples, "kdist_samples_total") == STEPS * 64
    assert value(samples, "kdist_step_duration_seconds_count") == 2 * STEPS
    assert value(samples, "kdist_last_step") == value(samples, "kdist_target_steps") == STEPS
    spent = total(samples, "kdist_step_phase_seconds_total")
    assert spent == pytest.approx(value(samples, "kdist_step_duration_seconds_sum"), rel=0.01)
    assert (
        total(samples, "kdist_collectives_total")
        == value(samples, "kdist_allreduce_duration_seconds_count")
        >= 2 * STEPS
    )
    assert total(samples, "kdist_collective_bytes_total") > 0
    assert value(samples, "kdist_job_state", state="succeeded") == 1
    assert value(samples, "kdist_world_size") == 2
    assert value(samples, "kdist_checkpoint_last_success_step") == STEPS


def check_promtool_finds_nothing(text: str) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
