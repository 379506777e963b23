"""Ranks for a measurement: processes with torchrun's variables, all running one function of a bench
module.

`launch("bench.step", 2, {...})` starts `python -m bench.step rank` twice and returns what rank 0
wrote as its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kdist_trainer.metrics.exporter import Exporter
from kdist_trainer.rendezvous.handler import pick_port

RESULT = "KDIST_BENCH_RESULT"


def free_ports(count: int) -> list[int]:
    """TCP ports of this machine that nobody listens on, all different, and that the kernel gives to
    no connection meanwhile.
    """
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(pick_port())
    return list(ports)


def launch_measured(module: str, orders: Mapping[str, int], contestants: int) -> Any:
    """The result of `module` as `orders["ranks"]` ranks, whose records an exporter receives as in a
    training.

    `KDIST_BENCH` holds the orders for the ranks, with the exporter's folder and a port for each
    round of each contestant.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.sock")
        exporter = Exporter(
            job="bench", run_id="bench", socket_path=path, port=0, addresses=["127.0.0.1"], info={}
        )
        exporter.start()
        try:
            spec = {**orders, "folder": folder, "ports": free_ports(contestants * orders["rounds"])}
            return launch(module, orders["ranks"], {"KDIST_BENCH": json.dumps(spec)})
        finally:
            exporter.close()


def launch(module: str, size: int, extra: Mapping[str, str]) -> Any:
    """Run `module` as `size` ranks and return rank 0's result. Raises `RuntimeError` if one of them
    fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            **os.environ,
            **extra,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
        }
        shared |= {"MASTER_ADDR": "127.0.0.1", RESULT: str(Path(folder) / "result")}
        command = [sys.executable, "-m", module, "rank"]
        log = Path(folder) / "log"
        with log.open("a") as output:
            ranks = [
                subprocess.Popen(
                    command,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=output,
                )
                for rank in range(size)
            ]
            try:
                codes = [rank.wait() for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
        if any(codes):
            raise RuntimeError(f"ranks of {module} ended with {codes}\n{log.read_text()[-4000:]}")
        return json.loads(Path(shared[RESULT]).read_text())


def report(result: Any) -> None:
    """Hand rank 0's result to `launch`."""
    if os.environ["RANK"] == "0":
        Path(os.environ[RESULT]).write_text(json.dumps(result))


@contextlib.contextmanager
def environment(**changes: str | None) -> Iterator[None]:
    """Set (or with None remove) variables inside the block."""
    before = {name: os.environ.get(name) for name in changes}
    assign(changes)
    try:
        yield
    finally:
        assign(before)


def assign(values: Mapping[str, str | None]) -> None:
    """Set or remove environment variables."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
