"""The Prometheus endpoint: renders a snapshot of all metrics as text, and serves it over HTTP.

The text follows from the declarations alone. The server answers GET and HEAD on a few fixed paths,
without request bodies, one request per connection. Sizes, times and the number of connections are
bounded; when there are too many, the oldest connection that has not sent its request is closed. It
runs an event loop in its own thread, so a slow client blocks nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kdist_trainer.metrics import declarations
from kdist_trainer.metrics.aggregation import ACCEPTED, MetricsSnapshot, add
from kdist_trainer.metrics.declarations import AGENT_METRICS, STATES, Kind, Metric, Scope
from kdist_trainer.metrics.step_stats import Wall
from kdist_trainer.metrics.wire import COUNTER_SLOTS, GAUGES, RECORDED, SLOTS

Labels = tuple[str, ...]
Series = dict[Labels, list[float]]
"""Label values (those of `Metric.labels`, after `rank` where the scope is RANK) to one number, or a
histogram's slots.
"""

JOB_LABEL = "kdist_job"
CATALOGUE: tuple[Metric, ...] = (*AGENT_METRICS, *RECORDED)
"""Every metric there is, in the order of the exposition."""


class Exposition(Collector):
    """A registry's collector that shows whatever `read` returns at each scrape: all series by the
    metric's name.
    """

    def __init__(self, job: str, read: Callable[[], Mapping[str, Series]]) -> None:
        self._job = job
        self._read = read
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def describe(self) -> Iterator[Family]:
        """Nothing: no other collector shares the registry, so there is no name to guard."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """The families that have a series, in the order of `CATALOGUE`."""
        numbers = self._read()
        for metric in CATALOGUE:
            if series := numbers.get(metric.name):
                yield _family(metric, series, self._job)


def label_names(metric: Metric) -> Labels:
    """Labels of a metric's series, `kdist_job` first."""
    return (JOB_LABEL, *(("rank",) if metric.scope is Scope.RANK else ()), *metric.labels)


def reported_series(snapshot: MetricsSnapshot, wall: Mapping[str, float]) -> dict[str, Series]:
    """The series of all recorded metrics by name; `wall` is the shown partition of wall time."""
    node = [0.0] * COUNTER_SLOTS
    for counters in snapshot.sums:
        node = add(node, counters)
    found: dict[str, Series] = {}
    for metric in RECORDED:
        if metric.scope is Scope.WITNESS:
            found[metric.name] = {
                (category,): [seconds]
                for category, seconds in wall.items()
                if seconds or category != Wall.UNOBSERVED
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
            leads = (
                metric.scope is not Scope.LEADER
                or 0 in snapshot.local_ranks
                or any(snapshot.leader[SLOTS[metric.name]])
            )
            found[metric.name] = (
                _split(metric, node if metric.scope is Scope.NODE else snapshot.leader)
                if leads
                else {}
            )
    return found


def own_series(snapshot: MetricsSnapshot, state: str, scrape_seconds: float) -> dict[str, Series]:
    """What an agent shows of itself besides what it was told: its state, who reports to it, how
    long a scrape takes.
    """
    return {
        declarations.SCRAPE_DURATION.name: {(): [scrape_seconds]},
        declarations.JOB_STATE.name: {(word,): [float(word == state)] for word in STATES},
        declarations.HEARTBEAT.name: {
            (str(rank),): [heard] for rank, heard in snapshot.heard.items()
        },
        declarations.RECORDS.name: {
            (word,): [float(count)]
            for word, count in snapshot.received.items()
            if count or word == ACCEPTED
        },
    }


_COUNTED = frozenset(
    metric.name
    for metric in (*RECORDED, declarations.LOST_STEPS, declarations.LOST_PROGRESS)
    if metric.kind is not Kind.GAUGE
)


def known_series(series: Mapping[str, Series]) -> dict[str, Series]:
    """Of a script's series those that something was told of.

    Where it reports no steps and no saves, nobody knows that there were none.
    """
    has_loss = bool(series.get("kdist_loss"))
    return {
        name: found
        for name, found in series.items()
        if name not in _COUNTED
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
        {labels: slots for labels, slots in parts.items() if any(slots)} if metric.quiet else parts
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
"""Most bytes of a request's line and headers."""
MAX_CONNECTIONS = 128
DEADLINE_SECONDS = 5.0
"""Longest time a client may take to send its request, and again to read the answer."""

_BACKLOG = 256


@dataclass(frozen=True)
class HttpResponse:
    """A response: status, body, and the media type of the body."""

    status: HTTPStatus
    body: bytes
    media_type: str = "text/plain; charset=utf-8"


Route = Callable[[str], HttpResponse]
"""Answers a path; the argument is the request's Accept header."""


class MetricsServer:
    """Serves `routes` (path to Route) on `host`:`port` (0: a free one). Raises `OSError` if it
    cannot listen there.
    """

    def __init__(self, routes: Mapping[str, Route], *, host: str, port: int) -> None:
        self._routes = routes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kdist-metrics-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop what is still open."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._listener, limit=MAX_HEAD, backlog=_BACKLOG
        )
        await self._stop.wait()
        server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  for the type checker: start_server made one
        if len(self._connections) >= MAX_CONNECTIONS:
            victim = next(iter(self._waiting), task)
            self._waiting.pop(victim, None)
            victim.cancel()
        self._connections.add(task)
        self._waiting[task] = None
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                await self._exchange(task, reader, writer)
        finally:
            self._waiting.pop(task, None)
            self._connections.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _exchange(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            answer, method = _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), "GET"
        else:
            self._waiting.pop(task, None)
            answer, method = self._answer(head)
        async with asyncio.timeout(DEADLINE_SECONDS):
            # so that drain waits until the client has taken all of it
            writer.transport.set_write_buffer_limits(0)
            writer.write(_encode(answer, with_body=method != "HEAD"))
            await writer.drain()

    def _answer(self, head: bytes) -> tuple[HttpResponse, str]:
        """The answer to a request's head, and the request's method."""
        line, *headers = head.decode("latin-1").split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return _plain(HTTPStatus.BAD_REQUEST), "GET"
        method, target, _ = words
        route = self._routes.get(target.partition("?")[0])
        if method not in {"GET", "HEAD"}:
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED), method
        if route is None:
            return _plain(HTTPStatus.NOT_FOUND), method
        fields = (header.partition(":") for header in headers)
        accept = next((value.strip() for name, _, value in fields if name.lower() == "accept"), "")
        try:
            return route(accept), method
        except Exception:  # noqa: BLE001  a fault of ours is one failed answer, not the end of the server
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR), method


def say(word: str, status: HTTPStatus) -> HttpResponse:
    """An answer of one line."""
    return HttpResponse(status, f"{word}\n".encode())


def _plain(status: HTTPStatus) -> HttpResponse:
    return say(status.phrase.lower(), status)


def _encode(answer: HttpResponse, *, with_body: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.media_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        *(["Allow: GET, HEAD"] if answer.status is HTTPStatus.METHOD_NOT_ALLOWED else []),
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (answer.body if with_body else b"")
