"""Every part runs in miniature on this machine's CPU, as it would on a GPU; one that fails or hangs
is a record like the others.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu.parts import MACHINE, PARTS, Order, Part, end, run, start
from bench.gpu.records import Record
from bench.gpu.restart import EVERY, KILLS
from bench.gpu.timers import STEPS
from tests.patience import soon

pytestmark = pytest.mark.processes
PLENTY = 240.0
LONG = [pytest.mark.chaos, pytest.mark.wide]
"""Of what takes a miniature long: run where there is time."""


def run_in_miniature(name: str, folder: Path) -> Record:
    part = next(part for part in (MACHINE, *PARTS) if part.name == name)
    record = run(part, "cpu", PLENTY, folder)
    assert "error" not in record, record["error"]
    assert 0 < record["seconds"] <= PLENTY
    figures: Record = record["figures"]
    return figures


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("precision", "matmul"),
    [
        pytest.param("fp32", "highest", marks=LONG),
        ("tf32", "high"),
        pytest.param("fp16", "highest", marks=LONG),
    ],
)
def test_precision_measures_the_setting_of_the_job(
    precision: str, matmul: str, tmp_path: Path
) -> None:
    figures = run_in_miniature(f"precision-{precision}", tmp_path)
    assert figures["precision"] == precision
    assert figures["matmul"] == matmul
    assert 0 < figures["low"] <= figures["tokens_per_second"] <= figures["high"]
    assert figures["memory_mib"] > 0
    assert figures["mfu"] is None
    # on a CPU torch's counter has no formula for attention, on a GPU it has
    assert 0 < figures["counted_flops_per_token"] <= figures["flops_per_token"]


@pytest.mark.chaos
@pytest.mark.wide
def test_timer_and_profiler_see_the_same_all_reduces(tmp_path: Path) -> None:
    rows = run_in_miniature("timers", tmp_path)["rows"]
    assert [(row["timed"], row["profiled"]) for row in rows] == [(STEPS, STEPS)] * 3
    assert all(min(row["timer_seconds"], row["profiler_seconds"]) > 0 for row in rows)


@pytest.mark.chaos
@pytest.mark.wide
def test_the_cost_of_measuring_is_that_of_every_kind(tmp_path: Path) -> None:
    figures = run_in_miniature("measuring-short", tmp_path)
    assert figures["groups"] >= 3
    nothing, *more = figures["kinds"]
    assert (nothing["more_seconds"], nothing["error_seconds"]) == (0, 0)
    assert len(more) == 2
    assert all(row["step_seconds"] > 0 and row["error_seconds"] > 0 for row in more)


@pytest.mark.sampled
def test_the_series_of_the_panels_are_looked_up_in_a_running_job(tmp_path: Path) -> None:
    rows = run_in_miniature("panels", tmp_path)["rows"]
    states = {row["series"]: row["state"] for row in rows}
    assert states["kdist_model_flops_total"] == states["kdist_world_size"] == "fed"
    assert states["kdist_device_memory_peak_bytes"] == "absent"
    assert states["kdist_device_alloc_retries_total"] == "absent, as while it is zero"
    assert states["DCGM_FI_DEV_XID_ERRORS"] == "not kdist's: DCGM's exporter has it"
    assert next(row["increase"] for row in rows if row["series"] == "kdist_model_flops_total") > 0


@pytest.mark.chaos
@pytest.mark.wide
def test_every_restart_continues_from_a_checkpoint(tmp_path: Path) -> None:
    figures = run_in_miniature("restart", tmp_path)
    assert len(figures["seconds"]) == KILLS["cpu"]
    assert all(seconds > 0 for seconds in figures["seconds"])
    assert all(step > EVERY for step in figures["resumed_at"])
    assert figures["resumed_at"] == sorted(figures["resumed_at"])


@pytest.mark.sampled
def test_a_part_that_fails_says_why(tmp_path: Path) -> None:
    part = Part("broken", "precision", PLENTY, {"precision": "fp7"})
    record = run(part, "cpu", PLENTY, tmp_path)
    assert "figures" not in record
    assert "train.precision" in record["error"]


def test_a_part_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    record = run(Part("missing", "no_such_module", PLENTY), "cpu", PLENTY, tmp_path)
    assert "ModuleNotFoundError" in record["error"]


def test_a_part_that_takes_too_long_is_a_failure(tmp_path: Path) -> None:
    record = run(Part("restart", "restart", PLENTY), "cpu", 0.2, tmp_path)
    assert record["error"].endswith("TimeoutError: it did not end within 0 s")


@pytest.mark.sampled
def test_a_part_that_is_ended_ends_the_job_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with (tmp_path / "log").open("w") as output:
        order = Order("restart", "cpu", time.monotonic() + PLENTY, {})
        process = start(order, tmp_path / "result", output)
        try:
            assert soon(lambda: len(launched(tmp_path)) >= 2, PLENTY / 4)
        finally:
            end(process)
    assert soon(lambda: not launched(tmp_path))
    assert not (tmp_path / "result").exists()


def launched(folder: Path) -> set[int]:
    """The processes of a job that `restart` has launched in this folder."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes()
        except OSError:
            continue
        if f"KDIST_BENCH_MARKS={folder}".encode() in variables:
            found.add(int(process.name))
    return found


def test_what_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); "
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-uc", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    end(process, grace=0.5)
    assert process.returncode == -signal.SIGKILL
