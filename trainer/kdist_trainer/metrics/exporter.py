"""The agent's metrics exporter: receives the ranks' records from a socket, keeps the agent's own
metrics, and serves both at the Prometheus endpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client.exposition import choose_encoder, generate_latest

from kdist_trainer import log
from kdist_trainer.config import Nodes
from kdist_trainer.liveness import Phase
from kdist_trainer.metrics import declarations, status
from kdist_trainer.metrics.aggregation import ACCEPTED, AgentMetrics, MetricsSnapshot, RankMetrics
from kdist_trainer.metrics.declarations import STATES
from kdist_trainer.metrics.endpoint import (
    Exposition,
    HttpResponse,
    MetricsServer,
    Series,
    known_series,
    own_series,
    reported_series,
    say,
)
from kdist_trainer.metrics.persistence import CounterState, CounterStore, read, sums_of
from kdist_trainer.metrics.reporter import reachable
from kdist_trainer.metrics.wall_time import WallTimeBreakdown
from kdist_trainer.metrics.wire import GAUGES, MAX_RECORD, SLOTS, MalformedRecordError, unpack

_MOST_AT_ONCE = 64
_MOST_ROUNDS = 16


class Receiver:
    """A datagram socket (0600) at `path` and the thread that reads it; `take` gets each datagram,
    one at a time.

    `lock` is held while datagrams are handed on, for no more than a few milliseconds. Raises
    `OSError` if `path` cannot be bound; a socket that a dead agent left there is replaced.
    """

    def __init__(self, path: Path, *, take: Callable[[bytes], None], lock: threading.Lock) -> None:
        self._path = path
        self._take = take
        self._lock = lock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            path.unlink(missing_ok=True)
            with reachable(path) as address:
                self._socket.bind(address)
            path.chmod(0o600)
        except OSError:
            self._socket.close()
            raise
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(
            target=self._read, name="kdist-metrics-receiver", daemon=True
        )
        self._thread.start()

    def drain(self) -> None:
        """Hand on what has arrived so far, a bounded number. The caller holds the lock."""
        for _ in range(_MOST_ROUNDS):
            if not self._drain_some():
                return

    def close(self) -> None:
        """Hand on what has arrived, stop reading, and take the socket away."""
        self._wake.send(b".")
        self._thread.join()
        with self._lock:
            self.drain()
        for end in (self._socket, self._wake, self._woken):
            end.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while self._woken.fileno() not in {descriptor for descriptor, _ in poll.poll()}:
            with self._lock:
                self._drain_some()

    def _drain_some(self) -> bool:
        """Hand on a bounded number of datagrams; whether there may be more."""
        for _ in range(_MOST_AT_ONCE):
            try:
                datagram = self._socket.recv(MAX_RECORD + 1)
            except OSError:  # empty; anything else shows as records that stay away
                return False
            self._take(datagram)
        return True


SCRIPT = "script"
"""What `kdist_job_info` calls the framework of a job that is a script."""
_READY_STATES = {"running", "checkpointing"}
_SAMPLES = SLOTS["kdist_samples_total"].start
_COMMITTED = GAUGES["kdist_checkpoint_last_success_step"]
_EWMA = GAUGES["kdist_step_duration_ewma_seconds"]
_STEP_TIME = GAUGES["kdist_last_step_timestamp_seconds"]


class Exporter:
    """The metrics of one agent and its ranks. All methods may be called from any thread, none waits
    for a rank or a client.

    `info` holds labels of `kdist_job_info` (`framework`, `workload_kind`, `world_size_min`,
    `world_size_max`) and may hold `node`; `nodes` says how many there may be. `since` is when the
    agent's wall time began, in monotonic seconds; now, if left out; `kept` the file that counters
    go on from. Numbers of the job rather than of this agent (lost steps, time to recover) are to be
    told by the agent that has rank 0 only, so that a sum is right. `scrapes` counts what was asked
    of `/metrics`.
    """

    def __init__(
        self,
        *,
        job: str,
        run_id: str,
        socket_path: Path,
        port: int,
        host: str,
        info: Mapping[str, str],
        healthy: Callable[[], bool] = lambda: True,
        nodes: Callable[[], Nodes] | None = None,
        since: float | None = None,
        kept: Path | None = None,
    ) -> None:
        self.port = port
        self.socket_path = socket_path
        self.scrapes = 0
        self._job = job
        self._run_id = run_id
        self._host = host
        self._node = info.get("node", "")
        self._healthy = healthy
        self._nodes = nodes
        self._lock = threading.Lock()
        self._state = STATES[0]
        self._told = AgentMetrics()
        self._totals = RankMetrics()
        before = read(kept, run_id=run_id) if kept else CounterState()
        self._told.resume(before.agent)
        self._totals.resume(before.ranks, before.leader)
        self._kept = kept
        self._keeper: CounterStore | None = None
        self._throughput = status.Throughput()
        self._managed = info.get("framework") != SCRIPT
        self._clock = WallTimeBreakdown(
            time.monotonic() if since is None else since, before.wall, observed=self._managed
        )
        self._failed_at: float | None = None
        self._record: dict[str, Any] | None = None
        self._scrape_seconds = 0.0
        self._exposition = Exposition(job, self._read)
        self._receiver: Receiver | None = None
        self._server: MetricsServer | None = None
        self._told.set_info({"run_id": run_id, **info})

    def start(self) -> None:
        """Bind the socket and the port, a free one where it is 0 or taken. What cannot be had is
        warned of, never fatal.
        """
        try:
            self._receiver = Receiver(self.socket_path, take=self._take, lock=self._lock)
        except OSError as error:
            log.warn(
                "metrics-socket-failed", message=f"ranks cannot report: {self.socket_path}: {error}"
            )
        self._keeper = (
            CounterStore(self._kept, lambda: sums_of(*self._look()), run_id=self._run_id)
            if self._kept
            else None
        )
        routes = {
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._ready,
            "/status": self._status,
        }
        for port in dict.fromkeys((self.port, 0)):
            try:
                self._server = MetricsServer(routes, host=self._host, port=port)
            except OSError as error:
                log.warn(
                    "metrics-port-in-use",
                    port=port,
                    message=f"port {port} for metrics cannot be had: {error}",
                )
                continue
            self.port = self._server.port
            return

    def close(self) -> None:
        """Take in what the ranks sent last, then stop answering. `expose` and `status` still
        work.
        """
        for part in (self._receiver, self._server, self._keeper):
            if part:
                part.close()
        self._receiver = self._server = self._keeper = None

    def set_state(self, state: str) -> None:
        """What the agent is doing, one of `STATES`. Raises `ValueError` for another word."""
        if state not in STATES:
            raise ValueError(f"no such state: {state}")
        with self._lock:
            self._drain()  # what a rank sent before this belongs to the time before this
            self._state = state
            self._clock.enter(state, now=time.monotonic())

    def set_end(self, record: Mapping[str, Any]) -> None:
        """The agent's work is over; `record` is its exit record, shown in `/status` as long as the
        agent stays.
        """
        self.set_state("succeeded" if record.get("outcome") in ("done", "stopped") else "failed")
        self._record = dict(record)

    def set_group(self, *, generation: int, world_size: int, local_ranks: Iterable[int]) -> None:
        """A group has formed, its ranks not started yet. Earlier sums become the base; ranks that
        left are shown no more.
        """
        with self._lock:
            self._drain()
            self._totals.form(generation=generation, world_size=world_size, local_ranks=local_ranks)
            self._told.set(declarations.GENERATION, generation)
            self._told.set(declarations.WORLD_SIZE, world_size)
            self._clock.report(self._totals.witness_wall(), has_stepped=False, now=time.monotonic())

    def add_restart(self, cause: str) -> None:
        """The worker group failed and starts again, the budget allowing: `cause` is a `Cause`."""
        with self._lock:
            self._told.count(declarations.RESTARTS, (str(cause),))
            self._failed_at = time.monotonic()

    def add_worker_exit(
        self, cause: str, signal: str | None = None, *, collective: str | None = None
    ) -> None:
        """A worker ended: a `Cause`, or `done` or `stopped`; the signal that killed it; the
        collective that it failed in.
        """
        with self._lock:
            self._told.count_exit(str(cause), signal or "none", collective)

    def observe_rendezvous(self, seconds: float, outcome: str) -> None:
        """A rendezvous ended after `seconds`: `formed`, `timeout` or `failed`."""
        with self._lock:
            self._told.observe(declarations.RENDEZVOUS_DURATION, seconds, (outcome,))

    def add_lost_steps(self, steps: int) -> None:
        """So many steps are done again; their time is taken as that of the last steps before."""
        with self._lock:
            self._told.count(declarations.LOST_STEPS, amount=steps)
            self._told.count(
                declarations.LOST_PROGRESS, amount=steps * (self._totals.gauges()[_EWMA] or 0.0)
            )

    def set_restarts_remaining(self, restarts: int, *, budget: int) -> None:
        """What is left of the job's budget; the next commit that a rank reports fills it up."""
        with self._lock:
            self._told.allow(restarts, budget=budget)

    def expose(self) -> str:
        """The metrics as of now, in Prometheus' text format."""
        return generate_latest(self._exposition.registry).decode()

    def status(self) -> dict[str, Any]:
        """The `/status` document; `exporter.status` says what is in it."""
        now = time.monotonic()
        with self._lock:
            self._drain()
            snapshot, wall = self._totals.snapshot(), self._clock.read(now, doing=self._doing())
            ranks = status.ranks(snapshot, self.socket_path.parent, now=now)
            rate = self._throughput.rate(self._totals.total(_SAMPLES), now=now)
            counted = status.counted(snapshot, self._told)
        return {
            "job": self._job,
            "run_id": self._run_id,
            "node": self._node,
            "state": self._state,
            "phase": self._state if self._record else ranks[0]["phase"] if ranks else None,
            **status.shown_gauges(snapshot),
            "samples_per_second": rate,
            **counted,
            "wall_seconds": wall,
            "nodes": self._nodes().model_dump() if self._nodes else None,
            "ranks": ranks,
            "pid": os.getpid(),
            "exit": self._record,
        }

    def _drain(self) -> None:
        """Take in what the ranks have sent so far, the lock held."""
        if self._receiver:
            self._receiver.drain()

    def _take(self, datagram: bytes) -> None:
        """One datagram, the lock held."""
        try:
            record = unpack(datagram)
        except MalformedRecordError:
            self._totals.reject()
            return
        had_stepped = self._totals.has_stepped
        if (
            self._totals.accept(record, now=time.time()) != ACCEPTED
            or record.rank not in self._totals.local_ranks[:1]
        ):
            return
        if record.gauges[_COMMITTED] is not None:
            self._told.refill()
        now = time.monotonic()
        self._throughput.add(self._totals.total(_SAMPLES), now=now)
        self._clock.report(
            self._totals.witness_wall(), has_stepped=self._totals.has_stepped, now=now
        )
        if self._totals.has_stepped and not had_stepped:
            self._first_step(record.started_ns, record.gauges[_STEP_TIME], now)

    def _first_step(self, started_ns: int, stepped_at: float | None, now: float) -> None:
        if stepped_at is not None:
            self._told.set(declarations.TIME_TO_FIRST_STEP, max(0.0, stepped_at - started_ns / 1e9))
        if self._failed_at is not None:
            self._told.set(declarations.TIME_TO_RECOVER, now - self._failed_at)
            self._failed_at = None

    def _look(self) -> tuple[MetricsSnapshot, dict[str, Series], dict[str, float]]:
        """All numbers as of now, detached; the lock is held for the copying only."""
        with self._lock:
            self._drain()
            wall = self._clock.read(time.monotonic(), doing=self._doing())
            return self._totals.snapshot(), self._told.snapshot(), wall

    def _read(self) -> dict[str, Series]:
        """All series as of now."""
        snapshot, told, wall = self._look()
        series = {
            **told,
            **reported_series(snapshot, wall),
            **own_series(snapshot, self._state, self._scrape_seconds),
        }
        return series if self._managed else known_series(series)

    def _doing(self) -> Phase | None:
        """What the first local rank is at in this generation."""
        beat = status.read_beat(self.socket_path.parent, 0)
        return beat.phase if beat and beat.generation == self._totals.generation else None

    def _metrics(self, accept: str) -> HttpResponse:
        started = time.perf_counter()
        encoder, media_type = choose_encoder(accept)
        body = encoder(self._exposition.registry)
        if self._keeper:
            self._keeper.keep(sums_of(*self._look()))
        self._scrape_seconds = time.perf_counter() - started
        self.scrapes += 1
        return HttpResponse(HTTPStatus.OK, body, media_type)

    def _health(self, _: str) -> HttpResponse:
        return (
            say("ok", HTTPStatus.OK)
            if self._healthy()
            else say("the agent is stuck", HTTPStatus.SERVICE_UNAVAILABLE)
        )

    def _ready(self, _: str) -> HttpResponse:
        return say(
            self._state,
            HTTPStatus.OK if self._state in _READY_STATES else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    def _status(self, _: str) -> HttpResponse:
        return HttpResponse(
            HTTPStatus.OK, json.dumps(self.status()).encode() + b"\n", "application/json"
        )
