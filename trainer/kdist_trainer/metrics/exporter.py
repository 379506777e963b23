"""The agent's metrics exporter: combines the records of its ranks with its own metrics and serves
both over HTTP, to Prometheus and as `/status`.

`Exposition` renders a snapshot of all metrics as text, which follows from the declarations alone.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kdist_trainer import log
from kdist_trainer.config import Nodes
from kdist_trainer.formats import FORMAT, FORMATS
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.metrics import agent_metrics, status
from kdist_trainer.metrics.agent_metrics import AGENT_METRICS, REASONS, STANDBY, STATES
from kdist_trainer.metrics.aggregation import (
    ACCEPTED,
    AgentMetrics,
    MetricsSnapshot,
    RankMetrics,
    WallTimeBreakdown,
    WorkAtRisk,
    add,
)
from kdist_trainer.metrics.metric import Kind, Metric, Scope
from kdist_trainer.metrics.persistence import (
    CounterState,
    CounterStore,
    counter_state,
    read_counters,
)
from kdist_trainer.metrics.rank_metrics import COLLECTIVES, WallCategory
from kdist_trainer.metrics.status import RunCounts, StatusSources
from kdist_trainer.metrics.transport import (
    COUNTER_SLOTS,
    GAUGES,
    RECORDED,
    SLOTS,
    MalformedRecordError,
    Receiver,
    unpack,
)
from kdist_trainer.network.pages import HttpResponse, serve_pages, text_response
from kdist_trainer.network.server import BoundedServer
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.processes.liveness import Phase

_SERVER = "metrics"
EXCHANGE = "exchange"
"""Label `server` of the connections that the exchange of a round has closed."""
SCRIPT = "script"
"""Label `framework` of `kdist_job_info` for a job that runs a script."""
_READY_STATES = {"running", "checkpointing"}
_SAMPLES = SLOTS["kdist_samples_total"].start
_FAILURES = SLOTS["kdist_checkpoint_failures_total"]
_COMMITTED = GAUGES["kdist_checkpoint_last_success_step"]
_EWMA = GAUGES["kdist_step_duration_ewma_seconds"]
_STEP_TIME = GAUGES["kdist_last_step_timestamp_seconds"]


class Exporter:
    """The metrics of one agent and its ranks. Thread-safe; no method waits for a rank or a client.

    Only the agent that runs rank 0 may add numbers of the job (lost steps), so that their sum over
    the agents is right. `scrapes` counts the requests for `/metrics` of scrapers, which ask for a
    version of a format; `kdist top`, curl and browsers ask for none.
    """

    def __init__(
        self,
        *,
        job: str,
        run_id: str,
        socket_path: Path,
        port: int,
        addresses: Sequence[str],
        info: Mapping[str, str],
        healthy: Callable[[], bool] = lambda: True,
        nodes: Callable[[], Nodes] | None = None,
        started_at: float | None = None,
        counters_path: Path | ObjectPath | None = None,
    ) -> None:
        """Restore the counters; `start` opens the socket for the records of the ranks, and the port
        (0 picks a free one).

        `info` has labels of `kdist_job_info` (`framework`, `workload_kind`, `world_size_min`,
        `world_size_max`), and optionally `node`. `healthy` returns whether the agent makes
        progress, for `/healthz`. `started_at` is the monotonic time at which the agent's wall time
        began, by default now.
        """
        self.port = port
        self.socket_path = socket_path
        self.scrapes = 0
        self._job = job
        self._run_id = run_id
        self._addresses = addresses
        self._node = info.get("node", "")
        self._healthy = healthy
        self._nodes = nodes
        self._lock = threading.Lock()
        self._state = STATES[0]
        persisted = read_counters(counters_path, run_id=run_id) if counters_path else CounterState()
        self._agent_metrics = AgentMetrics()
        self._agent_metrics.restore(persisted.agent)
        self._rank_metrics = RankMetrics()
        self._rank_metrics.restore(persisted.ranks, persisted.rank_zero)
        self._counters_path = counters_path
        self._counter_store: CounterStore | None = None
        self._throughput = status.Throughput()
        self._failed_saves = status.FailedSaves()
        self.at_risk = WorkAtRisk()
        self.run_counts = RunCounts()
        self._managed = info.get("framework") != SCRIPT
        self._wall_time = WallTimeBreakdown(
            time.monotonic() if started_at is None else started_at,
            persisted.wall,
            observed=self._managed,
        )
        self._failed_at: float | None = None
        self._budget: int | None = None
        self._exit_record: dict[str, Any] | None = None
        self.sources = StatusSources()
        self._scrape_seconds = 0.0
        self._exposition = Exposition(job, self._read)
        self._receiver: Receiver | None = None
        self._server: BoundedServer | None = None
        self._agent_metrics.set_info({"run_id": run_id, **info})

    def start(self) -> None:
        """Open the socket and the port, or a free port if it is in use. Failures are logged and
        never fatal.
        """
        try:
            self._receiver = Receiver(self.socket_path, on_datagram=self._process, lock=self._lock)
        except OSError as error:
            log.warn(
                "metrics-socket-failed", message=f"ranks cannot report: {self.socket_path}: {error}"
            )
        if self._counters_path:
            self._counter_store = CounterStore(
                self._counters_path,
                lambda: counter_state(*self._snapshot()),
                run_id=self._run_id,
            )
        routes = {
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._ready,
            "/status": self._status,
        }
        for port in dict.fromkeys((self.port, 0)):
            try:
                self._server = serve_pages(_SERVER, routes, self._addresses, port)
            except OSError as error:
                log.warn(
                    "metrics-port-in-use",
                    port=port,
                    message=(
                        f"cannot listen on port {port} of {', '.join(self._addresses)} for "
                        f"metrics: {error}"
                    ),
                )
                continue
            self.port = self._server.port
            return

    def close(self) -> None:
        """Process the last records and stop serving. `expose` and `status` still work."""
        for part in (self._receiver, self._server, self._counter_store):
            if part:
                part.close()
        self._receiver = None
        self._server = None
        self._counter_store = None

    def set_state(self, state: str) -> None:
        """Set the state of the agent, one of `STATES` or `STANDBY`. Raises `ValueError` if it is
        another one.
        """
        if state not in (*STATES, STANDBY):
            raise ValueError(f"no such state: {state}")
        with self._lock:
            self._drain()  # records sent so far belong to the previous state
            self._state = state
            self._wall_time.enter(state, now=time.monotonic())

    def nonfinite_loss(self) -> dict[str, Any]:
        """What the exit record says of a script's loss that was NaN or infinite. The managed loop
        says it itself.
        """
        return {} if self._managed else status.nonfinite_loss(self._snapshot()[0])

    def set_exit_record(self, record: Mapping[str, Any]) -> None:
        """Set the final state from the agent's exit record, and show the record in `/status`."""
        self.set_state("succeeded" if record.get("outcome") in ("done", "stopped") else "failed")
        self._exit_record = dict(record)
        self.at_risk.end()
        self.run_counts.end()

    def set_group(self, *, generation: int, world_size: int, local_ranks: Iterable[int]) -> None:
        """Start a worker group, of which `local_ranks` are on this node; call this after the
        rendezvous, after `run_counts.begin`, and before its ranks start.
        """
        with self._lock:
            self._drain()
            self._rank_metrics.start_group(
                generation=generation,
                world_size=world_size,
                local_ranks=local_ranks,
                committed=self.run_counts.committed,
            )
            self._agent_metrics.set(agent_metrics.GENERATION, generation)
            self._agent_metrics.set(agent_metrics.WORLD_SIZE, world_size)
            self._wall_time.report(
                self._rank_metrics.wall_seconds(), has_stepped=False, now=time.monotonic()
            )

    def add_restart(self, cause: str) -> None:
        """Count a failure of the worker group, which restarts if the budget allows it; `cause` is a
        `Cause`.
        """
        with self._lock:
            self._agent_metrics.increment(agent_metrics.RESTARTS, (str(cause),))
            self.run_counts.add_failure()
            self._failed_at = time.monotonic()

    def add_worker_exit(
        self, cause: str, signal: str | None = None, *, collective: str | None = None
    ) -> None:
        """Count the exit of a worker: its cause (a `Cause`, or `done` or `stopped`), the name of
        the signal that killed it, and of the collective that it failed in.
        """
        with self._lock:
            metrics = self._agent_metrics
            metrics.increment(agent_metrics.WORKER_EXITS, (str(cause), signal or "none"))
            if collective:
                op = collective if collective in COLLECTIVES else "other"
                metrics.increment(agent_metrics.COLLECTIVE_FAILURES, (op, str(cause)))

    def observe_rendezvous(self, seconds: float, outcome: str) -> None:
        """Observe the duration of a rendezvous; `outcome` is `formed`, `timeout` or `failed`."""
        with self._lock:
            self._agent_metrics.observe(agent_metrics.RENDEZVOUS_DURATION, seconds, (outcome,))

    def add_lost_steps(self, steps: int) -> None:
        """Count steps that are repeated. Their time is estimated from the latest step times."""
        with self._lock:
            self._agent_metrics.increment(agent_metrics.LOST_STEPS, amount=steps)
            self._agent_metrics.increment(
                agent_metrics.LOST_PROGRESS,
                amount=steps * (self._rank_metrics.gauges()[_EWMA] or 0.0),
            )

    def set_restarts_remaining(self, restarts: int, *, budget: int) -> None:
        """Set how many restarts of the job's budget remain. The next checkpoint that a rank commits
        resets them to the budget.
        """
        with self._lock:
            self._budget = budget
            self._agent_metrics.set(agent_metrics.RESTARTS_REMAINING, restarts)

    def expose(self) -> str:
        """Render all metrics in Prometheus' text format."""
        return generate_latest(self._exposition.registry).decode()

    def status(self) -> dict[str, Any]:
        """The `/status` document, see `kdist_trainer.metrics.status`."""
        now = time.monotonic()
        with self._lock:
            self._drain()
            snapshot = self._rank_metrics.snapshot()
            wall = self._wall_time.read(now, phase=self._current_phase())
            folder, activity = self.socket_path.parent, self.sources.activity()
            ranks = status.rank_entries(snapshot, folder, now=now, activity=activity)
            samples = self._rank_metrics.total(_SAMPLES)
            # a script may report none, and train all the same
            rate = self._throughput.rate(samples, now=now) if self._managed or samples else None
            restarts = self._agent_metrics.get(agent_metrics.RESTARTS_REMAINING)
            counts = self.run_counts.fields(self._agent_metrics)
            has_begun = self._rank_metrics.has_stepped
        return {
            FORMAT: FORMATS["/status"],
            "job": self._job,
            "run_id": self._run_id,
            "node": self._node,
            "state": self._state,
            "phase": self._state if self._exit_record else ranks[0]["phase"] if ranks else None,
            **status.training_fields(snapshot),
            "samples_per_second": rate,
            "generation": snapshot.generation,
            "world_size": snapshot.world_size,
            "restarts_remaining": None if restarts is None else int(restarts),
            **counts,
            "wall_seconds": wall,
            "nodes": self._nodes().model_dump() if self._nodes else None,
            "ranks": ranks,
            "at_risk_seconds": self.at_risk.seconds(now=time.time()),
            "connections_refused": status.count_refused(self._all_refused()),
            **self.sources.fields(
                ended=self._exit_record is not None,
                has_begun=has_begun or (not self._managed and status.is_seen(ranks)),
                failed_saves=self._failed_saves.count,
            ),
            "pid": os.getpid(),
            "exit": self._exit_record,
        }

    def _drain(self) -> None:
        """Process the records that have arrived. The caller holds the lock."""
        if self._receiver:
            self._receiver.drain()

    def _process(self, datagram: bytes) -> None:
        """Process one datagram. The caller holds the lock."""
        try:
            record = unpack(datagram)
        except MalformedRecordError:
            self._rank_metrics.reject()
            return
        had_stepped = self._rank_metrics.has_stepped
        if (
            self._rank_metrics.accept(record, now=time.time()) != ACCEPTED
            or record.rank not in self._rank_metrics.local_ranks[:1]
        ):
            return
        self.at_risk.add(record, now=time.time())
        if record.gauges[_COMMITTED] is not None and self._budget is not None:
            self._agent_metrics.set(agent_metrics.RESTARTS_REMAINING, self._budget)
        self._failed_saves.add(record.gauges[_COMMITTED], sum(record.counters[_FAILURES]))
        now = time.monotonic()
        self._throughput.add(self._rank_metrics.total(_SAMPLES), now=now)
        self._wall_time.report(
            self._rank_metrics.wall_seconds(),
            has_stepped=self._rank_metrics.has_stepped,
            now=now,
        )
        if had_stepped or not self._rank_metrics.has_stepped:
            return
        if (stepped_at := record.gauges[_STEP_TIME]) is not None:
            seconds = max(0.0, stepped_at - record.started_ns / 1e9)
            self._agent_metrics.set(agent_metrics.TIME_TO_FIRST_STEP, seconds)
        if self._failed_at is not None:
            self._agent_metrics.set(agent_metrics.TIME_TO_RECOVER, now - self._failed_at)
            self._failed_at = None

    def _snapshot(self) -> tuple[MetricsSnapshot, dict[str, Series], dict[str, float]]:
        """Copy all values: of the ranks, of the agent, and seconds of wall time by category."""
        with self._lock:
            self._drain()
            wall = self._wall_time.read(time.monotonic(), phase=self._current_phase())
            return self._rank_metrics.snapshot(), self._agent_metrics.snapshot(), wall

    def _read(self) -> dict[str, Series]:
        snapshot, agent, wall = self._snapshot()
        shown = "pending" if self._state == STANDBY else self._state
        series: dict[str, Series] = {
            **agent,
            **self.at_risk.series(now=time.time()),
            **reported_series(snapshot, wall),
            agent_metrics.SCRAPE_DURATION.name: {(): [self._scrape_seconds]},
            agent_metrics.JOB_STATE.name: {(each,): [float(each == shown)] for each in STATES},
            agent_metrics.HEARTBEAT.name: {
                (str(rank),): [time] for rank, time in snapshot.received_at.items()
            },
            agent_metrics.RECORDS.name: {
                (outcome,): [float(count)]
                for outcome, count in snapshot.received.items()
                if count or outcome == ACCEPTED
            },
            agent_metrics.CONNECTIONS_REFUSED.name: {
                (server, reason): [float(reasons.get(reason, 0))]
                for server, reasons in self._all_refused().items()
                for reason in REASONS
            },
        }
        return series if self._managed else drop_unreported(series)

    def _all_refused(self) -> dict[str, Mapping[str, int]]:
        """The connections that were closed, by reason, of each server of this agent."""
        own = self._server.refused if self._server is not None else {}
        return {_SERVER: own, EXCHANGE: self.sources.refused()}

    def _current_phase(self) -> Phase | None:
        """The phase of the first local rank, if its heartbeat is of this generation."""
        beat = status.read_heartbeat(self.socket_path.parent, 0)
        is_current = beat and beat.count and beat.generation == self._rank_metrics.generation
        return beat.phase if beat and is_current else None

    def _metrics(self, accept: str) -> HttpResponse:
        started = time.perf_counter()
        encoder, media_type = choose_encoder(accept)
        body = encoder(self._exposition.registry)
        if self._counter_store:  # before the response, so that no counter ever goes back
            self._counter_store.save(counter_state(*self._snapshot()))
        self._scrape_seconds = time.perf_counter() - started
        self.scrapes += "version=" in accept
        return HttpResponse(HTTPStatus.OK, body, media_type)

    def _health(self, _: str) -> HttpResponse:
        if self._healthy():
            return text_response(HTTPStatus.OK)
        return text_response(HTTPStatus.SERVICE_UNAVAILABLE, "the agent is stuck")

    def _ready(self, _: str) -> HttpResponse:
        is_ready = self._state in _READY_STATES
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return text_response(status, self._state)

    def _status(self, _: str) -> HttpResponse:
        return HttpResponse(
            HTTPStatus.OK, encode_json(self.status()).encode() + b"\n", "application/json"
        )


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
    """The series of all metrics that ranks report, by name; `wall` are seconds by category."""
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


_CUMULATIVE = frozenset(
    metric.name
    for metric in (*RECORDED, agent_metrics.LOST_STEPS, agent_metrics.LOST_PROGRESS)
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
