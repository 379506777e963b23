"""Which series of the dashboard's GPU panels a training on this device feeds: `kdist run` of one
rank, whose agent is scraped twice.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.launched import launch_job
from bench.gpu.parts import Order
from bench.gpu.training import SHAPES, describe
from kdist.agents.client import METRICS_BYTES, PodTransport
from kdist.agents.metrics import parse
from kdist.job.local.agents import ports
from kdist_trainer.metrics.exporter import CATALOGUE
from tools.dashboards.model import PanelRow
from tools.dashboards.training.operations import DEVICES, RESOURCES

STEPS = {"cuda": 50, "cpu": 5}
"""Before the first scrape, and again before the second one."""
APART_SECONDS = {"cuda": 10.0, "cpu": 1.0}
"""Between the two scrapes at least: the resources are sampled once a second."""
DCGM = "DCGM_"
NAME = re.compile(r"([a-zA-Z_:][\w:]*)\{")
_STEPS_TOTAL = "kdist_steps_total"

Scrape = dict[str, list[float]]
"""The values of all series by the metric's name."""


def measure(order: Order) -> dict[str, Any]:
    """What each series of the panels showed."""
    shape, device = SHAPES[order.device]["short"], order.device
    with (
        tempfile.TemporaryDirectory() as folder,
        launch_job(Path(folder), describe(shape, precision="bf16")) as job,
    ):
        find = partial(scrape, job.root)
        first = wait(find, job.process, steps=STEPS[device], end=order.end)
        later = time.monotonic() + APART_SECONDS[device]
        steps = max(first[_STEPS_TOTAL]) + STEPS[device]
        second = wait(find, job.process, steps=steps, end=order.end, not_before=later)
    rows = [row for panels in (DEVICES, RESOURCES) for row in look_up(panels, first, second)]
    return {"shape": shape._asdict(), "seconds_apart": APART_SECONDS[device], "rows": rows}


def scrape(root: Path) -> Scrape:
    """What the run's agent exports; empty until it answers."""
    found: Scrape = {}
    for port in ports(root).values():
        page = PodTransport("127.0.0.1", port).get("/metrics", timeout=5.0, most=METRICS_BYTES)
        for sample in parse(page.decode() if page else ""):
            found.setdefault(sample.name, []).append(sample.value)
    return found


def wait(
    find: partial[Scrape],
    process: subprocess.Popen[bytes],
    *,
    steps: float,
    end: float,
    not_before: float = 0.0,
) -> Scrape:
    """The first scrape with that many steps. Raises `RuntimeError` if there is none in time."""
    while time.monotonic() < end and process.poll() is None:
        found = find() if time.monotonic() >= not_before else {}
        if max(found.get(_STEPS_TOTAL, [0.0])) >= steps:
            return found
        time.sleep(0.2)
    raise RuntimeError(
        f"no scrape with {steps:.0f} steps: kdist run "
        + ("is too slow" if process.poll() is None else f"ended with {process.returncode}")
    )


def look_up(panels: PanelRow, first: Scrape, second: Scrape) -> Iterator[dict[str, Any]]:
    """A row for each series of each panel that is about GPUs."""
    for panel in panels.panels:
        for query in panel.queries.values():
            if panels is not DEVICES and DCGM not in query:
                continue
            for name in dict.fromkeys(NAME.findall(query)):
                if name == "kdist_job_info":  # only selects the training's pods
                    continue
                values = second.get(name, [])
                yield {
                    "panel": panel.title,
                    "series": name,
                    "state": state_of(name, values),
                    "value": max(values, default=None),
                    "increase": max(values) - max(first[name]) if values and name in first else 0,
                }


def state_of(name: str, values: list[float]) -> str:
    """`fed`, or why the series has nothing to show."""
    if any(values):
        return "fed"
    if name.startswith(DCGM):
        return "not kdist's: DCGM's exporter has it"
    if values:
        return "present, but zero"
    hidden = any(metric.name == name and metric.hide_zero for metric in CATALOGUE)
    return "absent, as while it is zero" if hidden else "absent"
