"""The end of an agent: it says how its work ended, to everybody who may ask, and goes or stays as it was told."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from kdist_trainer import log
from kdist_trainer.agent.outcome import write_record
from kdist_trainer.agent.settings import PARK, Settings
from kdist_trainer.agent.stopping import StopSignals, stop_margin
from kdist_trainer.config import Exit, TrainConfig
from kdist_trainer.exporter import SCRIPT, Exporter
from kdist_trainer.exporter.kept import place
from kdist_trainer.rendezvous.place import FILE

_LOOK_SECONDS = 0.2
_ANSWER_SECONDS = 0.5  # for the answer to arrive


def start_exporter(
    settings: Settings, procs: int, *, healthy: Callable[[], bool] = lambda: True, since: float | None = None
) -> Exporter:
    """The exporter of this agent, serving since a monotonic time; where it does is noted in `agent.json`. Raises `OSError`."""
    config = settings.config
    info = {
        "node": settings.node,
        "framework": config.train.strategy if config.train else SCRIPT,
        "workload_kind": config.train.workload if config.train else SCRIPT,
        "world_size_min": str(config.nodes.min * procs),
        "world_size_max": str(config.max_world_size(procs)),
    }
    exporter = Exporter(
        job=config.name,
        run_id=settings.run_id,
        socket_path=settings.socket,
        port=settings.port,
        host=_listening(settings),
        info=info,
        healthy=healthy,
        nodes=settings.bounds.now,
        since=since,
        kept=place(settings.checkpoints, run_id=settings.run_id, node=settings.node) if settings.checkpoints else None,
    )
    exporter.start()
    document = {"pid": os.getpid(), "port": exporter.port, "node": settings.node, "run_id": settings.run_id}
    fresh = settings.scratch / "agent.json.new"
    fresh.write_text(json.dumps(document))
    fresh.replace(settings.scratch / "agent.json")
    return exporter


def _listening(settings: Settings) -> str:
    """Where metrics and status are served: to this machine only, or to whoever may reach the pod."""
    if settings.rendezvous.startswith(f"{FILE}:"):
        return "127.0.0.1"
    return "::" if ":" in (settings.address or "") else "0.0.0.0"  # noqa: S104 - Prometheus comes from outside the pod


def end(settings: Settings, record: dict[str, Any], *, stop: StopSignals, exporter: Exporter | None = None) -> int:
    """Leave the record everywhere, linger or park as the job says; returns the exit code."""
    write_record(record, settings.scratch, settings.termination_message)
    code = Exit(record["code"])
    if code not in (Exit.DONE, Exit.STOPPED):
        fields = {name: record.get(name) for name in ("cause", "code", "rank", "step", "traceback", "message")}
        log.error("failed", node=record.get("node") or settings.node, **fields)
    parks = settings.on_end == PARK and not code.retryable
    if exporter is None and parks:
        exporter = start_exporter(settings, procs=1)
    if exporter is not None:
        exporter.set_end(record)
        if parks:
            log.event("parked", code=int(code), message="the work is over: this agent stays until it is told to go")
            while not stop.requested:
                time.sleep(_LOOK_SECONDS)
        elif not code.retryable:
            _linger(settings.config, exporter, stop)
        exporter.close()
    return int(code)


def _linger(config: TrainConfig, exporter: Exporter, stop: StopSignals) -> None:
    """Stay until the last numbers were scraped, at most so long as the job says; where nobody ever scraped, not at all.

    The end of the first agent has the others of its job taken away, so a request to stop shortens this to their grace only.
    """
    seen, deadline = exporter.scrapes, time.monotonic() + config.metrics_linger_seconds
    while seen and exporter.scrapes == seen and time.monotonic() < deadline and not stop.urgent:
        time.sleep(_LOOK_SECONDS)
        if stop.requested_at is not None:
            deadline = min(deadline, stop.requested_at + config.grace_seconds - stop_margin(config.grace_seconds))
    if exporter.scrapes > seen:
        time.sleep(_ANSWER_SECONDS)
