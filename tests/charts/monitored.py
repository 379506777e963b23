"""A real training with a real Prometheus that scrapes it, for tests of dashboards and alerts."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from kdist_trainer.processes.liveness import Heartbeat
from kdist_trainer.rendezvous.handler import pick_port
from tests.charts.rules import FILES
from tests.cli.running import Run
from tools.dashboards import DASHBOARDS
from tools.dashboards.prometheus import Prometheus, Window, fill

SCRAPE_SECONDS = 1
_TIMEOUT_SECONDS = 120.0
# Queries without an answer in a healthy training, and why.
SILENT = {
    "{{op}} failed: {{cause}}": "no save and no collective failed",
    "skipped: {{cause}}": "no checkpoint was damaged",
    "dropped": "every record was sent",
    "evaluation": "the training was not evaluated yet",
}


def until(condition: Callable[[], Any], what: str, seconds: float = _TIMEOUT_SECONDS) -> Any:
    """Wait until the condition is true, and return its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.1)
    return found


@contextmanager
def scraping(home: Path, rules: Iterable[Path] = FILES) -> Iterator[tuple[Prometheus, Path]]:
    """A Prometheus with these rules that scrapes every target of the file that comes with it, each
    second.
    """
    port, targets = pick_port(), home / "targets.json"
    targets.write_text("[]")
    every = f"{SCRAPE_SECONDS}s"
    scrape = {
        "job_name": "kdist",
        "file_sd_configs": [{"files": [str(home / "targets*.json")], "refresh_interval": "1s"}],
    }
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [scrape],
    }
    (home / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={home / 'prometheus.yaml'}",
        f"--storage.tsdb.path={home / 'tsdb'}",
    ]
    with (home / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: is_ready(url), "Prometheus that is ready")
        yield Prometheus(url), targets
    finally:
        process.terminate()
        process.wait()


def firing(prometheus: Prometheus) -> set[tuple[str, str]]:
    """The alerts that fire according to Prometheus, each with its job."""
    with urllib.request.urlopen(f"{prometheus.url}/api/v1/alerts", timeout=30) as answer:  # noqa: S310 - our own
        alerts = json.load(answer)["data"]["alerts"]
    return {
        (one["labels"]["alertname"], one["labels"].get("kdist_job", ""))
        for one in alerts
        if one["state"] == "firing"
    }


def unanswered(
    prometheus: Prometheus, window: Window, *, job: str, at: Iterable[float]
) -> list[str]:
    """Queries of panels that find no finite series at any of these times, but should."""
    found, times = [], list(at)
    for dashboard in DASHBOARDS.values():
        for panel in (panel for panel in dashboard.panels if not panel.optional):
            for legend, query in panel.queries.items():
                text = fill(
                    dashboard, query, window, chosen={"kdist_job": job}, scrape_seconds=window.step
                )
                series = [one for moment in times for one in prometheus.instant(text, at=moment)]
                if legend not in SILENT and not any(math.isfinite(one.last) for one in series):
                    found.append(text)
    return found


def is_ready(url: str) -> bool:
    """Whether a Prometheus there answers."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=2) as answer:  # noqa: S310 - our own
        return bool(answer.status == 200)
    return False


class Training:
    """A `kdist run` of two agents with a rank each, which a Prometheus scrapes."""

    def __init__(self, run: Run, name: str, targets: Path, *, namespace: str = "ml") -> None:
        self.run = run
        self.folder = run.folder(name)
        self._targets = targets
        self._namespace = namespace

    def agents(self) -> dict[str, dict[str, Any]]:
        """What each agent wrote when it started: its pid, its port."""
        found = {}
        for path in self.folder.glob("*/agent.json"):
            with suppress(OSError, ValueError):
                found[path.parent.name] = json.loads(path.read_text())
        return found

    def write_targets(self) -> None:
        """Write the agents' current addresses for Prometheus. Older addresses stay, as those of a
        pod do for a while.
        """
        known = {f"127.0.0.1:{agent['port']}" for agent in self.agents().values()}
        listed = [{"targets": sorted(known), "labels": {"namespace": self._namespace}}]
        fresh = self._targets.with_suffix(".new")
        fresh.write_text(json.dumps(listed))
        fresh.replace(self._targets)

    def kill_rank(self, node: str = "node-1", number: int = signal.SIGKILL) -> None:
        """Send a signal to the first rank of a node, once there is one: pid 0 would be this
        process' own group.
        """
        (beat,) = self.folder.glob(f"{node}/rank-0.heartbeat")
        os.kill(until(lambda: Heartbeat(beat).read().pid, "rank"), number)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The run ledger's events of this name."""
        path = self.folder / "checkpoints" / "ledger" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]


def write_job(
    home: Path,
    *,
    name: str = "digits",
    seconds: int = 60,
    train: Mapping[str, Any] | None = None,
    **spec: Any,
) -> str:
    """Write a job whose steps take about 0.1 s and that trains for about `seconds`."""
    training = {
        "workload": "digits",
        "steps": seconds * 10,
        "globalBatch": 256,
        "clipGradNorm": 5.0,
        "schedule": {"name": "cosine", "warmupSteps": 50, "finalRatio": 0.05},
        "optimizer": {"learningRate": 0.00004},
        "checkpoint": {"every": {"seconds": 15}},
        "loader": {"workers": 1},
        **(train or {}),
    }
    settings = {"nodes": 2, "procsPerNode": 1, **spec, "train": training}
    document = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": settings,
    }
    (home / "job.yaml").write_text(yaml.safe_dump(document))
    return "job.yaml"
