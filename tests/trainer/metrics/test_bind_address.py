"""The exporter's socket and port: private, replaceable, and never able to stop a training."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kdist_trainer.metrics import transport
from kdist_trainer.metrics.exporter import Exporter
from kdist_trainer.metrics.transport import NoShortFolderError, Reporter, pack, short_address
from tests.trainer.metrics.scrape import (
    exporting,
    fetch,
    full_stats,
    read,
    send_raw,
    total,
    wait_until,
)


def test_a_malformed_datagram_is_counted_and_changes_nothing_else(exporter: Exporter) -> None:
    good = pack(full_stats(0))
    nan_count = full_stats(0)
    nan_count.steps = float("nan")
    bad = [
        b"",
        b"\0",
        good[:-1],
        good + b"\0",
        b"evil" + good[4:],
        good[:4] + b"\xff" * 4 + good[8:],
        os.urandom(len(good)),
        bytes(2000),
    ]
    before = read(exporter.expose())
    send_raw(exporter.socket_path, *bad, pack(nan_count))
    after = read(exporter.expose())
    assert total(after, "kdist_exporter_records_total", outcome="malformed") == len(bad) + 1
    changed = {
        name for (name, labels), number in after.items() if before.get((name, labels), 0) != number
    }
    assert changed <= {"kdist_exporter_records_total", "kdist_wall_seconds_total"}


def test_a_port_in_use_is_replaced_by_a_free_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        exporting(tmp_path, port=taken.getsockname()[1]) as exporter,
    ):
        assert exporter.port != taken.getsockname()[1]
        assert fetch(exporter.port, "/healthz")[0] == 200
    assert '"event":"metrics-port-in-use","level":"warning"' in capfd.readouterr().err


def test_the_socket_is_private_and_replaces_one_that_was_left_behind(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as old:
        old.bind(str(tmp_path / "metrics.sock"))
    with exporting(tmp_path) as exporter:
        assert stat.S_IMODE((tmp_path / "metrics.sock").stat().st_mode) == 0o600
        exporter.set_group(generation=1, world_size=1, local_ranks=[0])
        send_raw(exporter.socket_path, pack(full_stats(0)))
        assert total(read(exporter.expose()), "kdist_steps_total") == 1
    assert not (tmp_path / "metrics.sock").exists()


def test_a_scratch_folder_with_a_very_long_path_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / ("x" * 120) / ("y" * 120)
    scratch.mkdir(parents=True)
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(scratch / "metrics.sock"))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))  # as in an agent
    with exporting(scratch) as exporter:
        exporter.set_group(generation=1, world_size=1, local_ranks=[0])
        Reporter(full_stats(0)).close()
        assert total(read(exporter.expose()), "kdist_steps_total") == 1
    with short_address(scratch / "metrics.sock") as address:
        assert len(address) < 100
    assert not Path(address).parent.exists()


@pytest.mark.processes
def test_a_scrape_is_answered_while_the_workers_are_stopped(exporter: Exporter) -> None:
    code = """
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.metrics.rank_metrics import StepStats
stats = StepStats(rank=0, generation=1)
reporter = Reporter(stats, min_interval_seconds=0)
while True:
    stats.add_step(0.001, 1, 1)
    reporter.send()
"""
    worker = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: total(read(exporter.expose()), "kdist_steps_total") > 0)
        worker.send_signal(signal.SIGSTOP)
        os.waitpid(worker.pid, os.WUNTRACED)
        first = fetch(exporter.port, "/metrics")
        second = fetch(exporter.port, "/metrics")
        assert (first[0], second[0]) == (200, 200)
        assert (
            total(read(first[1]), "kdist_steps_total")
            == total(read(second[1]), "kdist_steps_total")
            > 0
        )
    finally:
        worker.kill()
        worker.wait()


def test_a_training_starts_even_where_nothing_can_be_bound(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = Exporter(
        job="digits",
        run_id="r",
        socket_path=tmp_path / "no" / "s",
        port=0,
        addresses=["203.0.113.1"],
        info={},
    )
    made.start()
    made.set_group(generation=1, world_size=1, local_ranks=[0])
    assert total(read(made.expose()), "kdist_generation") == 1
    made.close()
    events = [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()]
    assert events == ["metrics-socket-failed", "metrics-port-in-use"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_exporter_listens_on_its_port_of_the_given_address_and_nowhere_else(
    tmp_path: Path,
) -> None:
    before = listening()
    with exporting(tmp_path) as exporter:
        assert listening() - before == {f"0100007F:{exporter.port:04X}"}


def listening() -> set[str]:
    """Local addresses on which this process accepts TCP connections, as /proc lists them."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            mine.add(str(descriptor.readlink()))
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        rows = (
            [row.split() for row in Path(table).read_text().splitlines()[1:]]
            if Path(table).exists()
            else []
        )
        found |= {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}
    return found


def test_a_long_tmpdir_is_not_used_and_without_a_short_folder_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with short_address(long / "metrics.sock") as address:
        assert len(address) <= 100
    monkeypatch.setattr(transport, "_SHORT_FOLDERS", (str(tmp_path / "none"),))
    with (
        pytest.raises(NoShortFolderError, match=f"TMPDIR is {long}.*set TMPDIR to a folder"),
        short_address(long / "metrics.sock"),
    ):
        pass
