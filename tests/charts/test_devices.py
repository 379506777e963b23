"""Panels of what only machines with GPUs have: ranks report devices to their agents, and a DCGM
exporter and cAdvisor export theirs.

No GPU is needed: the values come through the ranks' own socket and the agents' own endpoint, those
of the other exporters in their format.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kdist import backends
from kdist_trainer.metrics.exporter import Exporter
from kdist_trainer.metrics.rank_metrics import Op, StepStats
from kdist_trainer.metrics.transport import Reporter
from tests.charts.monitored import SCRAPE_SECONDS, scraping, until
from tools.dashboards import DASHBOARDS
from tools.dashboards.model import Panel
from tools.dashboards.page import render_dashboard
from tools.dashboards.panel import name_of
from tools.dashboards.prometheus import Prometheus, Window, fill

pytestmark = pytest.mark.processes

GIB = 2.0**30
PEAK = 989e12
CONTAINERS = sorted({backends.get(name).container for name in backends.NAMES})
"""How workload kinds call the container of the ranks: of the two pods, each has another one's."""
# What `nvidia/dcgm-exporter` exports of two GPUs on a node; one is not ours. GR_ENGINE is for a
# DCGM that does not export the SM.
DCGM = """\
# HELP DCGM_FI_PROF_GR_ENGINE_ACTIVE Ratio of time the graphics engine is active.
# TYPE DCGM_FI_PROF_GR_ENGINE_ACTIVE gauge
DCGM_FI_PROF_GR_ENGINE_ACTIVE{ours} 0.75
DCGM_FI_PROF_GR_ENGINE_ACTIVE{other} 0.11
# HELP DCGM_FI_PROF_PIPE_TENSOR_ACTIVE Ratio of cycles the tensor (HMMA) pipe is active.
# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{ours} 0.25
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{other} 0.22
# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{ours} 79
DCGM_FI_DEV_XID_ERRORS{other} 13
"""
SM_ACTIVE = (
    "# TYPE DCGM_FI_PROF_SM_ACTIVE gauge\nDCGM_FI_PROF_SM_ACTIVE{ours} 0.5\n"
    "DCGM_FI_PROF_SM_ACTIVE{other} 0.11\n"
)
CADVISOR = """\
# TYPE container_memory_working_set_bytes gauge
container_memory_working_set_bytes{ours} 3221225472
container_memory_working_set_bytes{other} 1
# TYPE container_cpu_usage_seconds_total counter
container_cpu_usage_seconds_total{ours} SECONDS
container_cpu_usage_seconds_total{other} 1
"""


class OtherExporter(ThreadingHTTPServer):
    """An exporter that is not ours: answers every request with its text."""

    def __init__(self, text: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.text = text

    def __enter__(self) -> OtherExporter:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: OtherExporter

    def do_GET(self) -> None:
        data = self.server.text.replace("SECONDS", str(2 * time.time())).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""


def metrics_of(text: str, number: int, *, job: str = "digits") -> str:
    """The metrics of another exporter about a pod of the training, and about another pod."""
    device = f'gpu="{number}",UUID="GPU-{number}",device="nvidia{number}",'
    device += f'modelName="NVIDIA H100",Hostname="n{number}",'
    for word, pod in (("ours", f"{job}-{number}"), ("other", "somebody-else")):
        labels = f'{device}container="{CONTAINERS[number]}",namespace="ml",pod="{pod}"'
        text = text.replace(f"{{{word}}}", f"{{{labels}}}")
    return text


def report(stats: StepStats, seconds: float) -> None:
    """Set what a rank on a GPU reports after `seconds` of training."""
    stats.model_flops = 0.4 * PEAK * seconds
    stats.alloc_retries = 3 * seconds
    stats.peak_flops = PEAK
    for op in Op:  # a tenth of the time, at 4 GB/s
        stats.collective_seconds[op] = 0.1 * seconds
        stats.collective_bytes[op] = 4e8 * seconds
        stats.collectives[op] = seconds
    stats.device_allocated = 10 * GIB
    stats.device_reserved = 20 * GIB
    stats.device_peak = (15 + stats.rank) * GIB


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Window]]:
    """A Prometheus that has scraped two pods with one GPU each; DCGM exports the SM of one of
    them.
    """
    home, start = tmp_path_factory.mktemp("devices"), time.time()
    info = {"framework": "ddp", "workload_kind": "digits"}
    info |= dict.fromkeys(("world_size_min", "world_size_max"), "2")
    with ExitStack() as stack:
        reporters = []
        for number in (0, 1):
            path = home / f"{number}.sock"
            exporter = Exporter(
                job="digits",
                run_id="r",
                socket_path=path,
                port=0,
                addresses=["127.0.0.1"],
                info=info,
            )
            exporter.start()
            stack.callback(exporter.close)
            exporter.set_group(generation=1, world_size=2, local_ranks=[number])
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("KDIST_METRICS_SOCKET", str(path))
                stats = StepStats(rank=number, generation=1)
                reporters.append(Reporter(stats, min_interval_seconds=0))
            pod = {"namespace": "ml", "pod": f"digits-{number}"}
            add_target(
                home, f"agent-{number}", f"127.0.0.1:{exporter.port}", {**pod, "job": "kdist"}
            )
            text = metrics_of(DCGM + (SM_ACTIVE if number else ""), number)
            dcgm = stack.enter_context(OtherExporter(text))
            own = {"namespace": "gpu-operator", "pod": f"nvidia-dcgm-exporter-{number}"}
            # once as Prometheus scrapes by itself (`exported_pod`), once as with `honorLabels`
            labels = {"job": "dcgm-exporter", **(own if number else {})}
            add_target(home, f"dcgm-{number}", dcgm.address, labels)
            kubelet = stack.enter_context(OtherExporter(metrics_of(CADVISOR, number)))
            add_target(home, f"kubelet-{number}", kubelet.address, {"job": "kubelet"})
        prometheus, _ = stack.enter_context(scraping(home, rules=()))
        until(
            lambda: work(reporters, prometheus, time.time() - start), "rates of all that grows", 120
        )
        end = time.time()
        yield prometheus, Window(start, end, SCRAPE_SECONDS)
        for reporter in reporters:
            reporter.close()


def add_target(home: Path, name: str, address: str, labels: dict[str, str]) -> None:
    """Add a target for Prometheus, with the labels that an operator would set."""
    fresh = home / f"{name}.new"
    fresh.write_text(json.dumps([{"targets": [address], "labels": labels}]))
    fresh.replace(home / f"targets-{name}.json")


def work(reporters: list[Reporter], prometheus: Prometheus, seconds: float) -> bool:
    """Report each rank's values after `seconds`; whether Prometheus has scraped both for a few
    seconds.
    """
    for reporter in reporters:
        report(reporter.stats, seconds)
        reporter.send()
    return len(prometheus.instant("kdist_model_flops_total offset 3s", at=time.time())) == 2


def ask(seen: tuple[Prometheus, Window], panel: Panel) -> dict[str, float]:
    """The last number of each series of a panel by its name."""
    prometheus, window = seen
    dashboard = DASHBOARDS["training-job"]
    found: dict[str, float] = {}
    chosen = {"kdist_job": "digits", "namespace": "ml"}
    for legend, query in panel.queries.items():
        text = fill(dashboard, query, window, chosen=chosen, scrape_seconds=SCRAPE_SECONDS)
        for one in prometheus.instant(text, at=window.end):
            name = name_of(legend, one.labels)
            assert name not in found
            found[name] = one.last
    return found


def panel_named(title: str, *, optional: bool = True) -> Panel:
    panels = [each for each in DASHBOARDS["training-job"].panels if each.optional is optional]
    (panel,) = [each for each in panels if each.title == title]
    return panel


EXPECTED = {
    "Model FLOPs utilization": {"MFU": 0.4},
    "Device memory": {"allocated": 10 * GIB, "reserved": 20 * GIB},
    "Peak device memory": {"rank 0": 15 * GIB, "rank 1": 16 * GIB},
    "Allocator retries": {"rank 0": 3.0, "rank 1": 3.0},
    "Memory": {"digits-0": 3 * GIB, "digits-1": 3 * GIB},
    "CPU": {"digits-0": 2.0, "digits-1": 2.0},
    "GPU activity": {"digits-0 GPU 0": 0.75, "digits-1 GPU 1": 0.5},
    "Tensor cores": {"digits-0 GPU 0": 0.25, "digits-1 GPU 1": 0.25},
    "Last XID error": {"digits-0 GPU 0": 79.0, "digits-1 GPU 1": 79.0},
}


def test_every_optional_panel_is_tested_here() -> None:
    panels = DASHBOARDS["training-job"].panels
    assert {panel.title for panel in panels if panel.optional} == set(EXPECTED)


def test_memory_and_cpu_are_those_of_the_ranks_container_whatever_the_workload_kind() -> None:
    for title in ("Memory", "CPU"):
        (query,) = panel_named(title).queries.values()
        (names,) = re.findall(r'\bcontainer=~"([^"]*)"', query)
        assert sorted(names.split("|")) == CONTAINERS, title


@pytest.mark.parametrize("title", EXPECTED)
def test_a_panel_shows_the_training_alone_and_in_its_unit(
    seen: tuple[Prometheus, Window], title: str
) -> None:
    found = ask(seen, panel_named(title))
    assert set(found) == set(EXPECTED[title])
    rated = title in ("Model FLOPs utilization", "Allocator retries", "CPU")
    for name, value in EXPECTED[title].items():
        assert math.isclose(found[name], value, rel_tol=0.3 if rated else 1e-9), name


def test_the_page_draws_optional_rows_that_have_answers(
    seen: tuple[Prometheus, Window], tmp_path: Path
) -> None:
    prometheus, window = seen
    dashboard, chosen = DASHBOARDS["training-job"], {"kdist_job": "digits"}
    page = render_dashboard(dashboard, prometheus, window, chosen=chosen, theme="light")
    (tmp_path / "page.html").write_text(page)
    assert "<h2>GPUs (where there are any)</h2>" in page
    assert "digits-1 GPU 1 <b>25.0 %</b>" in page
    assert "<b>15 GiB</b>" in page


def test_other_targets_of_prometheus_are_not_counted_as_agents(
    seen: tuple[Prometheus, Window],
) -> None:
    assert len(seen[0].instant("up", at=seen[1].end)) == 6
    assert ask(seen, panel_named("Scraped", optional=False)) == {"up": 2.0}
    assert len(ask(seen, panel_named("Series", optional=False))) == 2


def test_the_bus_bandwidth_is_that_of_all_reduces_as_nccl_tests_count(
    seen: tuple[Prometheus, Window],
) -> None:
    found = ask(seen, panel_named("Bus bandwidth", optional=False))
    assert found == pytest.approx({"training": 4e9}, rel=0.01)
