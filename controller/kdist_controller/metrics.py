"""The controller's own metrics, and the server of `/metrics` for Prometheus and of `/healthz` and
`/readyz` for the kubelet.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kdist.status import Phase
from kdist_trainer.network.pages import HttpResponse, serve_pages, text_response
from kdist_trainer.network.server import BoundedServer

_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of one controller, in a registry of their own. `phases` returns the phase of
    every TrainingJob, `depth` how many jobs wait to be reconciled, `failing` how many could not be
    changed when last tried, `avoided` namespace and name of each TrainingJob with each node that it
    avoids.
    """

    def __init__(
        self,
        phases: Callable[[], Iterable[str]],
        depth: Callable[[], int],
        failing: Callable[[], int],
        avoided: Callable[[], Iterable[tuple[str, str, str]]],
    ) -> None:
        self.registry = CollectorRegistry()

        def collect_phases() -> Iterator[Metric]:
            found = GaugeMetricFamily(
                "kdist_controller_jobs", "TrainingJobs by phase.", labels=["phase"]
            )
            counts = Tally(phases())
            for phase in Phase:
                found.add_metric([phase.value], counts.get(phase.value, 0))
            yield found

        def collect_avoided() -> Iterator[Metric]:
            what = "1 for each TrainingJob and each node that it avoids."
            names = ["kdist_namespace", "kdist_job", "node"]
            found = GaugeMetricFamily("kdist_controller_node_avoided", what, labels=names)
            for labels in avoided():
                found.add_metric(labels, 1)
            yield found

        self.registry.register(_Collector(collect_phases))
        self.registry.register(_Collector(collect_avoided))
        self.reconcile_seconds = Histogram(
            "kdist_controller_reconcile_seconds",
            "Time to look at one TrainingJob and to change what has to be changed.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.errors = Counter(
            "kdist_controller_reconcile_errors",
            "Failed attempts to change the objects of a TrainingJob.",
            registry=self.registry,
        )
        self.agent_requests = Counter(
            "kdist_controller_agent_requests",
            "Requests to agents, by whether they were answered.",
            ["result"],
            registry=self.registry,
        )
        self.leader = Gauge(
            "kdist_controller_leader",
            "1 on the replica that leads, else 0.",
            registry=self.registry,
        )
        for name, what, count in (
            ("queue_depth", "TrainingJobs waiting to be reconciled.", depth),
            (
                "failing_jobs",
                "TrainingJobs that could not be changed at the last attempt.",
                failing,
            ),
        ):
            gauge = Gauge(f"kdist_controller_{name}", what, registry=self.registry)
            gauge.set_function(count)

    def show_refused(self, refused: Callable[[], Mapping[str, int]]) -> None:
        """Show the connections to the controller that were closed, by reason."""

        def collect() -> Iterator[Metric]:
            found = CounterMetricFamily(
                "kdist_controller_connections_refused",
                "Connections that the controller has closed to stay within its bounds.",
                labels=["reason"],
            )
            for reason, count in refused().items():
                found.add_metric([reason], count)
            yield found

        self.registry.register(_Collector(collect))


class _Collector(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def serve(
    addresses: Sequence[str],
    port: int,
    registry: CollectorRegistry,
    *,
    healthy: Callable[[], bool],
    ready: Callable[[], bool],
) -> BoundedServer:
    """Serve the pages of one controller, on a thread that ends with the process; port 0 is a free
    one. Raises `OSError`.
    """

    def answer(good: bool) -> HttpResponse:
        if good:
            return text_response(HTTPStatus.OK)
        return text_response(HTTPStatus.SERVICE_UNAVAILABLE, "not yet")

    routes = {
        "/metrics": lambda _: HttpResponse(
            HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_LATEST
        ),
        "/healthz": lambda _: answer(healthy()),
        "/readyz": lambda _: answer(ready()),
    }
    return serve_pages("metrics", routes, addresses, port)
