"""The Prometheus endpoint: renders a snapshot of all metrics as text, and serves it over HTTP.

The text follows from the declarations alone. The server answers GET and HEAD on a few fixed paths,
without request bodies, one request per connection. Sizes, times and the number of connections are
bounded; at the limit, the oldest connection that has not sent its request is closed. The server
runs an event loop in its own thread, so a slow client blocks nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kdist_trainer.metrics import declarations
from kdist_trainer.metrics.aggregation import ACCEPTED, MetricsSnapshot, add
from kdist_trainer.metrics.declarations import AGENT_METRICS, STANDBY, STATES, Kind, Metric, Scope
from kdist_trainer.metrics.step_stats import WallCategory
from kdist_trainer.metrics.wire import COUNTER_SLOTS, GAUGES, RECORDED, SLOTS
from kdist_trainer.threads import OnError, start_thread

Labels = tuple[str, ...]
Series = dict[Labels, list[float]]
"""One number, or a histogram's slots, by label values: those of `Metric.labels`, preceded by `rank`
if the scope is RANK.
"""

JOB_LABEL = "kdist_job"
CATALOGUE: tuple[Metric, ...] = (*AGENT_METRICS, *RECORDED)
"""Every metric, in the order of the exposition."""


class Exposition(Collector):
    """A collector of the values that `read` returns at each scrape: all series by the metric's
    name.
    """

    def __init__(self, job: str, read: Callable[[], Mapping[str, Series]]) -> None:
        self._job = job
        self._read = read
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def describe(self) -> Iterator[Family]:
        """Empty: the registry has no other collector, so names cannot collide."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Yield the families that have a series, in the order of `CATALOGUE`."""
        values = self._read()
        for metric in CATALOGUE:
            if series := values.get(metric.name):
                yield _family(metric, series, self._job)


def label_names(metric: Metric) -> Labels:
    """The label names of a metric's series, `kdist_job` first."""
    return (JOB_LABEL, *(("rank",) if metric.scope is Scope.RANK else ()), *metric.labels)


def reported_series(snapshot: MetricsSnapshot, wall: Mapping[str, float]) -> dict[str, Series]:
    """The series of all metrics that ranks report, by name.

    Args:
        snapshot: The reported values.
        wall: Wall time in seconds by category.
    """
    node = [0.0] * COUNTER_SLOTS
    for counters in snapshot.in_order:
        node = add(node, counters)
    found: dict[str, Series] = {}
    for metric in RECORDED:
        if metric.scope is Scope.LOCAL_RANK_ZERO:
            found[metric.name] = {
                (category,): [seconds]
                for category, seconds in wall.items()
                if seconds or category != WallCategory.UNOBSERVED
            }
        elif metric.kind is Kind.GAUGE and metric.scope is Scope.RANK:
            known = {
                rank: record.gauges[GAUGES[metric.name]]
                for rank, record in sorted(snapshot.current.items())
            }
            found[metric.name] = {
                (str(rank),): [value] for rank, value in known.items() if value is not None
            }
        elif metric.kind is Kind.GAUGE:
            value = snapshot.gauges[GAUGES[metric.name]]
            found[metric.name] = {} if value is None else {(): [value]}
        elif metric.scope is Scope.RANK:
            found[metric.name] = {
                (str(rank), *labels): slots
                for rank, counters in snapshot.by_rank.items()
                for labels, slots in _split(metric, counters).items()
            }
        else:
            is_shown = (
                metric.scope is not Scope.RANK_ZERO
                or 0 in snapshot.local_ranks
                or any(snapshot.rank_zero[SLOTS[metric.name]])
            )
            found[metric.name] = (
                _split(metric, node if metric.scope is Scope.NODE else snapshot.rank_zero)
                if is_shown
                else {}
            )
    return found


def exporter_series(
    snapshot: MetricsSnapshot, state: str, scrape_seconds: float
) -> dict[str, Series]:
    """The series of the exporter itself, by the metric's name.

    Args:
        snapshot: The reported values.
        state: The agent's state, one of `STATES` or `STANDBY`.
        scrape_seconds: Duration of the last scrape.
    """
    shown = "pending" if state == STANDBY else state
    return {
        declarations.SCRAPE_DURATION.name: {(): [scrape_seconds]},
        declarations.JOB_STATE.name: {(each,): [float(each == shown)] for each in STATES},
        declarations.HEARTBEAT.name: {
            (str(rank),): [time] for rank, time in snapshot.received_at.items()
        },
        declarations.RECORDS.name: {
            (outcome,): [float(count)]
            for outcome, count in snapshot.received.items()
            if count or outcome == ACCEPTED
        },
    }


_CUMULATIVE = frozenset(
    metric.name
    for metric in (*RECORDED, declarations.LOST_STEPS, declarations.LOST_PROGRESS)
    if metric.kind is not Kind.GAUGE
)


def drop_unreported(series: Mapping[str, Series]) -> dict[str, Series]:
    """Drop a script's metrics that are all zero: a script that reports no steps may still have
    done some.
    """
    has_loss = bool(series.get("kdist_loss"))
    return {
        name: found
        for name, found in series.items()
        if name not in _CUMULATIVE
        or any(map(any, found.values()))
        or (name == "kdist_nonfinite_total" and has_loss)
    }


def _split(metric: Metric, counters: list[float]) -> Series:
    start = SLOTS[metric.name].start
    size = metric.slots // len(metric.series)
    parts = {
        labels: counters[start + i * size : start + (i + 1) * size]
        for i, labels in enumerate(metric.series)
    }
    return (
        {labels: slots for labels, slots in parts.items() if any(slots)}
        if metric.hide_zero
        else parts
    )


def _family(metric: Metric, series: Series, job: str) -> Family:
    names = label_names(metric)
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=names, unit=metric.unit)
        for labels, slots in series.items():
            counts, cumulative = [], 0.0
            for bound, count in zip((*metric.buckets, math.inf), slots, strict=False):
                cumulative += count
                counts.append(("+Inf" if bound == math.inf else str(bound), cumulative))
            histogram.add_metric((job, *labels), counts, slots[-1])
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(
        metric.name, metric.help, labels=names, unit=metric.unit
    )
    for labels, slots in series.items():
        family.add_metric((job, *labels), slots[0])
    return family


MAX_HEAD = 8192
"""Maximum size of a request's line and headers, in bytes."""
MAX_CONNECTIONS = 128
DEADLINE_SECONDS = 5.0
"""Maximum time for a client to send its request, and the same to read the response."""

_BACKLOG = 256


@dataclass(frozen=True)
class HttpResponse:
    """A response: status, body, and the media type of the body."""

    status: HTTPStatus
    body: bytes
    media_type: str = "text/plain; charset=utf-8"


Route = Callable[[str], HttpResponse]
"""Handles requests for a path; the argument is the request's Accept header."""


class MetricsServer:
    """An HTTP server for a few fixed paths."""

    def __init__(self, routes: Mapping[str, Route], *, host: str, port: int) -> None:
        """Start to serve.

        Args:
            routes: The handler of each path.
            host: Address to listen on.
            port: Port to listen on; 0 picks a free one.

        Raises:
            OSError: The server cannot listen there.
        """
        self._routes = routes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = start_thread(self._run, name="kdist-metrics-http", on_error=OnError.REPORT)

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._handle_connection, sock=self._listener, limit=MAX_HEAD, backlog=_BACKLOG
        )
        await self._stop.wait()
        server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  for the type checker: start_server made one
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._waiting), task)
            self._waiting.pop(oldest, None)
            oldest.cancel()
        self._connections.add(task)
        self._waiting[task] = None
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                await self._handle_request(task, reader, writer)
        finally:
            self._waiting.pop(task, None)
            self._connections.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _handle_request(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            response, method = _error_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), "GET"
        else:
            self._waiting.pop(task, None)
            response, method = self._respond(head)
        async with asyncio.timeout(DEADLINE_SECONDS):
            # so that drain waits until the client has read all of it
            writer.transport.set_write_buffer_limits(0)
            writer.write(_encode(response, with_body=method != "HEAD"))
            await writer.drain()

    def _respond(self, head: bytes) -> tuple[HttpResponse, str]:
        """Handle a request, given its line and headers. Returns the response and the method."""
        line, *headers = head.decode("latin-1").split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return _error_response(HTTPStatus.BAD_REQUEST), "GET"
        method, target, _ = words
        route = self._routes.get(target.partition("?")[0])
        if method not in {"GET", "HEAD"}:
            return _error_response(HTTPStatus.METHOD_NOT_ALLOWED), method
        if route is None:
            return _error_response(HTTPStatus.NOT_FOUND), method
        fields = (header.partition(":") for header in headers)
        accept = next((value.strip() for name, _, value in fields if name.lower() == "accept"), "")
        try:
            return route(accept), method
        except Exception:  # noqa: BLE001  a bug in a handler fails one request, not the server
            return _error_response(HTTPStatus.INTERNAL_SERVER_ERROR), method


def bind_address(pod_address: str | None, *, is_local: bool) -> str:
    """The address that the exporter listens on: loopback for `kdist run`, all interfaces in a pod,
    since Prometheus scrapes from outside.

    Args:
        pod_address: The pod's own address, which says whether it is IPv4 or IPv6.
        is_local: Whether all agents of the run are on this machine.
    """
    if is_local:
        return "127.0.0.1"
    return "::" if ":" in (pod_address or "") else "0.0.0.0"  # noqa: S104 - see above


def text_response(line: str, status: HTTPStatus) -> HttpResponse:
    """A plain-text response of one line."""
    return HttpResponse(status, f"{line}\n".encode())


def _error_response(status: HTTPStatus) -> HttpResponse:
    return text_response(status.phrase.lower(), status)


def _encode(response: HttpResponse, *, with_body: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {response.status.value} {response.status.phrase}",
        f"Content-Type: {response.media_type}",
        f"Content-Length: {len(response.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(["Allow: GET, HEAD"] if response.status is HTTPStatus.METHOD_NOT_ALLOWED else []),
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (
        response.body if with_body else b""
    )
