"""An exporter holds as much after very many scrapes as after a few."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import soon
from tests.process_usage import Usage, count
from tests.trainer.metrics.scrape import fetch

GROWTH_KIB = 4 << 10
_SHARE = 5
"""Of the scrapes, one in so many comes before the first look: what is made once is there then."""
_PROGRAM = """
import sys
from pathlib import Path
from kdist_trainer.metrics.transport import pack
from tests.trainer.metrics.scrape import exporting, full_stats, record_everything, send_raw
with exporting(Path(sys.argv[1])) as exporter:
    exporter.set_group(generation=1, world_size=8, local_ranks=list(range(8)))
    exporter.set_state("running")
    record_everything(exporter)
    for rank in range(8):
        send_raw(Path(sys.argv[1]) / "metrics.sock", pack(full_stats(rank)))
    print(exporter.port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def exporter_alone(folder: Path) -> Iterator[tuple[int, int]]:
    """Pid and port of an exporter in a process of its own, with eight ranks."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(folder)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def scrape(port: int, times: int) -> None:
    """As Prometheus and `kdist status` do."""
    for number in range(times):
        status, text, _ = fetch(port, "/status" if number % 7 == 0 else "/metrics")
        assert status == 200
        assert len(text) > 100


@pytest.mark.processes
@pytest.mark.parametrize(
    "scrapes",
    [500, pytest.param(100_000, marks=[pytest.mark.chaos, pytest.mark.wide])],
)
@pytest.mark.timeout(3600)
@pytest.mark.sampled
def test_many_scrapes_leave_no_more_behind_than_a_few(tmp_path: Path, scrapes: int) -> None:
    with exporter_alone(tmp_path) as (pid, port):
        scrape(port, scrapes // _SHARE)
        few: Usage = count(pid)
        scrape(port, scrapes - scrapes // _SHARE)
        soon(lambda: count(pid).descriptors <= few.descriptors)  # the last connections are closed
        many = count(pid)
    sys.stdout.write(f"{few} -> {many}\n")
    assert many.private_kib <= few.private_kib + GROWTH_KIB
    assert many.descriptors <= few.descriptors + 2
    assert many.threads <= few.threads + 2
