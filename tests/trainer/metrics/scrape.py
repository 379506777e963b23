"""Shared by tests of the exporter: a listening exporter, ranks that report to it, and a parser of
its output.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kdist_trainer.metrics.exporter import Exporter
from kdist_trainer.metrics.rank_metrics import Op, StepPhase, StepStats, WallCategory
from kdist_trainer.metrics.transport import Record, pack, unpack

INFO = {
    "framework": "ddp",
    "workload_kind": "digits",
    "world_size_min": "1",
    "world_size_max": "8",
    "node": "node-0",
}

BASE_SERIES, SERIES_OF_A_RANK = 100, 30
"""The most that an agent may have: Prometheus keeps each of them."""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@contextmanager
def exporting(scratch: Path, *, port: int = 0) -> Iterator[Exporter]:
    """An exporter that listens on a free port of this machine, its socket in `scratch`."""
    exporter = make_exporter(scratch, port=port)
    exporter.start()
    try:
        yield exporter
    finally:
        exporter.close()


def make_exporter(scratch: Path, *, port: int = 0) -> Exporter:
    """An exporter that has not started."""
    return Exporter(
        job="digits",
        run_id="r1",
        socket_path=scratch / "metrics.sock",
        port=port,
        addresses=["127.0.0.1"],
        info=INFO,
    )


def read(text: str) -> Samples:
    """Every sample of an exposition by name and labels, the job's label left out."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("kdist_job") == "digits"
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """One sample."""
    return samples[name, frozenset(labels.items())]


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of the samples of a name that have these labels."""
    return sum(
        number
        for (found, have), number in samples.items()
        if found == name and labels.items() <= dict(have).items()
    )


def counters(samples: Samples) -> Samples:
    """The samples that may only grow."""
    return {
        key: number
        for key, number in samples.items()
        if key[0].endswith(("_total", "_bucket", "_count", "_sum"))
    }


def fetch(
    port: int, path: str, *, method: str = "GET", accept: str = ""
) -> tuple[int, str, dict[str, str]]:
    """Status, body and headers (lower case) of one request to this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers={"Accept": accept} if accept else {})
        response = connection.getresponse()
        headers = {name.lower(): text for name, text in response.getheaders()}
        return response.status, response.read().decode(), headers
    finally:
        connection.close()


def full_stats(
    rank: int, generation: int = 1, *, strategies: Collection[str] = ("ddp", "hsdp")
) -> StepStats:
    """The metrics of a rank, with every metric set that a job of these strategies has."""
    stats = StepStats(rank=rank, generation=generation)
    stats.add_step(0.02, 8, 100)
    if "ddp" in strategies:
        stats.add_all_reduces(busy=0.004, exposed=0.001, nbytes=4096, durations=[0.001, 0.003])
    for op in Op if "hsdp" in strategies else ():
        stats.add_collectives(op, busy=0.002, nbytes=8192, count=2)
    for phase in StepPhase:
        stats.phase[phase] += 0.003
    for category in set(WallCategory) - {
        WallCategory.UNOBSERVED
    }:  # a rank that reports is observed
        stats.add_wall(category, 0.001)
    for kind in ("loss", "grad"):
        stats.add_nonfinite(kind)
    stats.add_checkpoint("save", visible=0.01, total=0.5, nbytes=10_000, step=100)
    stats.add_checkpoint("save", cause="enospc")
    stats.add_checkpoint("restore", total=0.2)
    stats.add_fallback("corrupt")
    stats.checkpoint_interval, stats.probe_bandwidth = 300.0, 8e9
    stats.memory = 3e8
    stats.queue_depth = 4
    stats.peak_flops = 989e12
    stats.model_flops = 1e15
    stats.alloc_retries = 1
    stats.compile_seconds = 2.5
    stats.device_allocated, stats.device_reserved, stats.device_peak = 1e9, 2e9, 1.5e9
    stats.loss, stats.grad_norm, stats.learning_rate, stats.target_steps = 0.5, 1.5, 0.001, 200
    return stats


def record_of(stats: StepStats) -> Record:
    """The next record of a rank, as it arrives."""
    return unpack(pack(stats))


def record_everything(exporter: Exporter) -> None:
    """Record one of everything that an agent records itself."""
    exporter.add_restart("signal")
    exporter.add_worker_exit("signal", "SIGKILL", collective="all_reduce")
    exporter.add_worker_exit("done")
    exporter.observe_rendezvous(1.5, "formed")
    exporter.add_lost_steps(3)
    exporter.set_restarts_remaining(9, budget=10)


def wait_until(
    condition: Callable[[], bool], seconds: float = 60.0, *, every: float = 0.01
) -> None:
    """Return once the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(every)


def send_raw(path: Path, *datagrams: bytes) -> None:
    """Send bytes to a socket, whatever they are."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for datagram in datagrams:
            sender.sendto(datagram, str(path))
