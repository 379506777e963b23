"""Runs one agent from start to end: process setup, metrics exporter, elastic agent, exit record.

At the end the agent writes its exit record, waits for a last scrape of its metrics, and exits, or
stays parked if it was started with `--on-end park`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kdist_trainer import liveness, log, process_tree
from kdist_trainer.agent import forkserver
from kdist_trainer.agent.exit_record import failed, read_done, stopped, success, write_record
from kdist_trainer.agent.log_relay import LogRelay
from kdist_trainer.agent.settings import (
    PARK,
    Settings,
    clean_temp,
    count_procs,
    make_tempdir,
    prepare_scratch,
)
from kdist_trainer.agent.telemetry import AgentTelemetry
from kdist_trainer.config import Cause, Exit, TrainConfig
from kdist_trainer.errors import (
    CheckpointMismatchError,
    Failure,
    KdistTrainerError,
    classify,
    describe,
)
from kdist_trainer.metrics.exporter import SCRIPT, Exporter
from kdist_trainer.metrics.persistence import place
from kdist_trainer.rendezvous.endpoint import FILE
from kdist_trainer.signals import StopRequested, StopSignals, stop_margin

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler

_LOOK_SECONDS = 0.2
_ANSWER_SECONDS = 0.5  # for the answer to arrive


def start_exporter(
    settings: Settings,
    procs: int,
    *,
    healthy: Callable[[], bool] = lambda: True,
    since: float | None = None,
) -> Exporter:
    """Start the metrics exporter of this agent and write its port to `agent.json`; `since` is a
    monotonic time. Raises `OSError`.
    """
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
        kept=place(settings.checkpoints, run_id=settings.run_id, node=settings.node)
        if settings.checkpoints
        else None,
    )
    exporter.start()
    document = {
        "pid": os.getpid(),
        "port": exporter.port,
        "node": settings.node,
        "run_id": settings.run_id,
    }
    fresh = settings.scratch / "agent.json.new"
    fresh.write_text(json.dumps(document))
    fresh.replace(settings.scratch / "agent.json")
    return exporter


def _listening(settings: Settings) -> str:
    """The address on which metrics and status are served: loopback for `kdist run`, all interfaces
    in a pod.
    """
    if settings.rendezvous.startswith(f"{FILE}:"):
        return "127.0.0.1"
    return "::" if ":" in (settings.address or "") else "0.0.0.0"  # noqa: S104 - Prometheus comes from outside the pod


def end(
    settings: Settings,
    record: dict[str, Any],
    *,
    stop: StopSignals,
    exporter: Exporter | None = None,
) -> int:
    """Write the exit record and wait for a last scrape, or park, as the job asks; returns the exit
    code.
    """
    write_record(record, settings.scratch, settings.termination_message)
    code = Exit(record["code"])
    if code not in (Exit.DONE, Exit.STOPPED):
        fields = {
            name: record.get(name)
            for name in ("cause", "code", "rank", "step", "traceback", "message")
        }
        log.error("failed", node=record.get("node") or settings.node, **fields)
    parks = settings.on_end == PARK and not code.retryable
    if exporter is None and parks:
        exporter = start_exporter(settings, procs=1)
    if exporter is not None:
        exporter.set_end(record)
        if parks:
            log.event(
                "kept-alive",
                code=int(code),
                message="the work is over: this agent stays until it is told to go",
            )
            while not stop.requested:
                time.sleep(_LOOK_SECONDS)
        elif not code.retryable:
            _linger(settings.config, exporter, stop)
        exporter.close()
    return int(code)


def _linger(config: TrainConfig, exporter: Exporter, stop: StopSignals) -> None:
    """Wait for a last scrape, at most as long as the job allows; not at all if nothing was ever
    scraped.

    The end of the first agent makes the others of its job stop too, so a request to stop shortens
    the wait only to their grace period.
    """
    seen, deadline = exporter.scrapes, time.monotonic() + config.final_scrape_timeout_seconds
    while seen and exporter.scrapes == seen and time.monotonic() < deadline and not stop.urgent:
        time.sleep(_LOOK_SECONDS)
        if stop.requested_at is not None:
            deadline = min(
                deadline,
                stop.requested_at
                + config.termination_grace_period_seconds
                - stop_margin(config.termination_grace_period_seconds),
            )
    if exporter.scrapes > seen:
        time.sleep(_ANSWER_SECONDS)


_MONITOR_SECONDS = 0.1
RUN = "kdist.dev/run"


def launch(settings: Settings) -> int:
    """Run the agent of one node until its work is over; returns the exit code. Raises `OSError` if
    it cannot start.
    """
    began = time.monotonic()
    log.bind(job=settings.config.name, node=settings.node)
    predecessors = prepare_scratch(settings)
    stop = StopSignals()
    stop.install()
    try:
        done = read_done(settings.checkpoints, settings.config, run_id=settings.run_id)
    except CheckpointMismatchError as error:
        return end(settings, failed(describe(error, node=settings.node)), stop=stop)
    if done is not None:
        message = (
            f"run {settings.run_id} has ended before: nothing is left to do; on a cluster the "
            f"annotation {RUN} begins another"
        )
        log.warn("done", step=done.get("step"), message=message)
        return end(settings, {**success(step=done.get("step")), "message": message}, stop=stop)
    # Closed by the kernel when this process ends: held to the last, so that nothing of it outlives
    # it.
    held = _setup_process(settings)
    if settings.config.train is not None:
        forkserver.start()  # before anything that starts a thread
    procs = count_procs(settings.config)
    health: list[Any] = []
    exporter = start_exporter(
        settings, procs, healthy=lambda: not health or health[0].is_healthy(), since=began
    )
    with LogRelay(settings.scratch, ranks=procs) as relay:
        teller = AgentTelemetry(
            exporter,
            relay,
            max_restarts=settings.config.max_restarts,
            managed=settings.config.train is not None,
        )
        record = _conclude(settings, procs, teller, stop, predecessors, health)
        health.clear()  # an agent whose work is over is well
        code = end(settings, record, stop=stop, exporter=exporter)
    clean_temp(settings.scratch)
    del held
    return code


def _conclude(
    settings: Settings,
    procs: int,
    teller: AgentTelemetry,
    stop: StopSignals,
    predecessors: set[int],
    health: list[Any],
) -> dict[str, Any]:
    """The exit record of the work, however it ended."""
    try:
        return _work(settings, procs, teller, stop, predecessors, health)
    except KdistTrainerError as error:
        cause, reason, message = error.cause, error.code, str(error)
    except StopRequested:
        return stopped("stopped before it met the others", step=None)
    except Exception as error:  # noqa: BLE001 - whatever it is, the record and the exit code must say so
        with suppress(OSError):
            traceback.print_exc()
        message = f"the agent failed: {type(error).__name__}: {error}"
        full = classify(error)[0] is Cause.STORAGE
        cause, reason = (Cause.STORAGE, Exit.STORAGE) if full else (Cause.UNKNOWN, Exit.PEERS_LOST)
    return failed(Failure(cause, reason, True, message, node=settings.node, time=time.time()))


def _setup_process(settings: Settings) -> liveness.ParentDeathPipe:
    """Make the process a session leader that dies with `kdist run`, and set the workers'
    environment.
    """
    with suppress(PermissionError):  # started as a leader already
        os.setsid()
    process_tree.adopt()  # what a rank leaves behind becomes this agent's to end
    if settings.lifeline is not None:
        liveness.watch(settings.lifeline)
    own = liveness.ParentDeathPipe.create(settings.own_lifeline)
    os.environ.update(settings.environment())
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.config.threads_per_rank))
    if settings.config.script is not None:
        os.environ.setdefault("KDIST_COLLECTIVE_TIMING", settings.config.script.collective_timing)
    # SIGTERM and SIGINT are taken by StopSignals
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"
    clean_temp(settings.scratch)
    (settings.scratch / "torchelastic").mkdir()
    tempfile.tempdir = str(make_tempdir(settings.scratch))
    return own


def _work(
    settings: Settings,
    procs: int,
    teller: AgentTelemetry,
    stop: StopSignals,
    predecessors: set[int],
    health: list[Any],
) -> dict[str, Any]:
    """Run the elastic agent, with everything that needs torch; returns the exit record."""
    from kdist_trainer.agent.agent import ElasticAgent
    from kdist_trainer.agent.coordination import AgentStore
    from kdist_trainer.agent.rendezvous import open_handler, open_stores

    _silence_torch_logging()
    with stop.interruptible():
        stores = open_stores(settings, stop)
        handler = open_handler(settings, stores, predecessors=predecessors)
    spec = _worker_spec(settings, procs, handler)
    if settings.config.script is not None and settings.code is not None:
        os.chdir(settings.code)
    patient, hasty = (
        AgentStore(store, run_id=settings.meeting, node=settings.node)
        for store in (stores.patient, stores.hasty)
    )
    agent = ElasticAgent(
        spec,
        settings,
        exchange=patient,
        hasty=hasty,
        teller=teller,
        stop=stop,
        start_method="forkserver",
    )
    health.append(agent)
    agent.run()
    if not Exit(agent.record["code"]).retryable:
        stores.take_leave(agents=agent.group_size)
    return agent.record


def _worker_spec(settings: Settings, procs: int, handler: RendezvousHandler) -> WorkerSpec:
    """The worker group of this node, for torch elastic: a function, or a script in subprocesses."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from kdist_trainer.agent.worker_entry import run_worker

    script = settings.config.script
    return WorkerSpec(
        role="default",
        local_world_size=procs,
        rdzv_handler=handler,
        entrypoint=run_worker if script is None else sys.executable,
        args=(settings.entrypoint,)
        if script is None
        else ("-u", "-m", "kdist_trainer.run_script", *script.command),
        max_restarts=settings.config.max_restarts,
        monitor_interval=_MONITOR_SECONDS,
    )


def _silence_torch_logging() -> None:
    """Disable torch's own messages about its agent: kdist's events report the same."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).disabled = True
