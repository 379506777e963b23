"""Runs one agent from start to end: process setup, metrics exporter, elastic agent, exit record.

At the end the agent writes its exit record, waits for a final scrape of its metrics, and exits.
With `--on-finish keep-alive` it stays alive until SIGTERM.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any

from kdist_trainer import log
from kdist_trainer.agent import compile_cache, forkserver
from kdist_trainer.agent.exits import (
    describe_full,
    failed,
    read_done,
    stopped,
    success,
    write_record,
)
from kdist_trainer.agent.logs import KeptLog, LogRelay, place_of, read_secrets
from kdist_trainer.agent.settings import (
    FILE,
    KEEP_ALIVE,
    KUBERNETES,
    Settings,
    clean_temp,
    count_procs,
    limit_threads,
    make_tempdir,
    name_interfaces,
    prepare_scratch,
)
from kdist_trainer.agent.tracker_process import TrackerProcess
from kdist_trainer.agent.trainjob_status import TrainJobStatusReporter
from kdist_trainer.checkpoint.manifest import COMPILED
from kdist_trainer.config import Cause, Exit, TrainConfig
from kdist_trainer.config.exit_codes import CODES
from kdist_trainer.errors import CheckpointMismatchError, KdistTrainerError, classify
from kdist_trainer.formats import RUN
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.ipc.failure import Failure, describe
from kdist_trainer.metrics.exporter import SCRIPT, Exporter
from kdist_trainer.metrics.persistence import counters_path
from kdist_trainer.network.server import LOOPBACK, own_addresses, with_loopback
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.processes import descriptors, liveness, process_tree
from kdist_trainer.processes.shim import STARTED_AT
from kdist_trainer.processes.signals import StopRequested, StopSignals, kill_deadline

_POLL_SECONDS = 0.2
_RESPONSE_SECONDS = 0.5  # for the response to the final scrape to arrive


def start_exporter(
    settings: Settings,
    procs: int,
    *,
    healthy: Callable[[], bool] = lambda: True,
    since: float | None = None,
) -> Exporter:
    """Start the metrics exporter of this agent and write its port to `agent.json`. `healthy` says
    whether the agent is alive, for `/healthz`; it has started at monotonic time `since`, now by
    default. Raises `OSError` if the file or the socket cannot be created.
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
        addresses=_exporter_addresses(settings),
        info=info,
        healthy=healthy,
        nodes=settings.node_limits.current,
        started_at=since,
        counters_path=counters_path(
            settings.checkpoints, run_id=settings.run_id, node=settings.node
        )
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
    fresh.write_text(encode_json(document))
    fresh.replace(settings.scratch / "agent.json")
    return exporter


def _exporter_addresses(settings: Settings) -> tuple[str, ...]:
    """Loopback for `kdist run`; else also this node's own addresses, from which Prometheus, probes
    and the API server's proxy come.
    """
    if settings.rendezvous.startswith(f"{FILE}:"):
        return LOOPBACK[:1]
    try:
        return with_loopback(own_addresses(settings.listen or settings.address))
    except OSError as error:
        log.warn(
            "metrics-address-unknown",
            message=f"metrics are served on loopback alone; name this node's --address: {error}",
        )
        return LOOPBACK


def end(
    settings: Settings,
    record: dict[str, Any],
    *,
    stop: StopSignals,
    exporter: Exporter | None = None,
    tracker: TrackerProcess | None = None,
    status: TrainJobStatusReporter | None = None,
) -> int:
    """Write the exit record, then wait for the tracker, and for a final scrape or stay alive, as
    the settings say, until a request to stop; returns the exit code. The exporter is closed, and
    the tracker ends; after a failure that another agent continues after, at once. `status` sends
    the last progress, if the run has ended by itself.
    """
    record = {**record, **(exporter.nonfinite_loss() if exporter is not None else {})}
    write_record(record, settings.scratch, settings.termination_message)
    code = Exit(record["code"])
    if code not in (Exit.DONE, Exit.STOPPED):
        names = ("cause", "code", "rank", "step", "traceback", "message")
        fields = {name: record.get(name) for name in names}
        log.error("failed", node=record.get("node") or settings.node, **fields)
    if status is not None and not stop.requested and not code.retryable:
        status.end()
    keep_alive = settings.on_finish == KEEP_ALIVE and not code.retryable
    if exporter is None and keep_alive:
        exporter = start_exporter(settings, procs=1)
    if exporter is not None:
        exporter.set_exit_record(record)
    if tracker is not None and code.retryable:
        tracker.kill()
    elif tracker is not None:
        tracker.end(stop)
    if exporter is not None:
        if keep_alive:
            log.event(
                "kept-alive",
                code=int(code),
                message="the run is over: this agent stays alive until SIGTERM",
            )
            while not stop.requested:
                time.sleep(_POLL_SECONDS)
        elif not code.retryable:
            _wait_for_final_scrape(settings.config, exporter, stop)
        exporter.close()
    return int(code)


def _wait_for_final_scrape(config: TrainConfig, exporter: Exporter, stop: StopSignals) -> None:
    """Wait for a final scrape, at most as long as the job allows; not at all if metrics were never
    scraped.

    When the first agent exits, the others of its job are asked to stop too, so a request to stop
    shortens the wait only to the grace period.
    """
    before, deadline = exporter.scrapes, time.monotonic() + config.final_scrape_timeout_seconds
    while before and exporter.scrapes == before and time.monotonic() < deadline and not stop.urgent:
        time.sleep(_POLL_SECONDS)
        if stop.requested_at is not None:
            deadline = min(
                deadline,
                kill_deadline(stop.requested_at, config.termination_grace_period_seconds),
            )
    if exporter.scrapes > before:
        time.sleep(_RESPONSE_SECONDS)


_MONITOR_SECONDS = 0.1


def launch(settings: Settings) -> int:
    """Run the agent of one node until its work is over; returns the exit code. Raises `OSError` if
    the agent cannot start.
    """
    # the monotonic time at which this agent was started, before it imported anything
    try:
        started_at = float(os.environ.pop(STARTED_AT, ""))
    except ValueError:
        started_at = time.monotonic() - process_tree.age_seconds()
    descriptors.raise_limit()
    descriptors.reserve()
    log.bind(job=settings.config.name, node=settings.node)
    predecessors = prepare_scratch(settings)
    stop = StopSignals()
    stop.install()
    # Kept to the end: the kernel closes it when this process exits, which ends the workers.
    pipe: Any = None
    if isinstance(settings.checkpoints, ObjectPath):
        pipe = _start_forkservers(settings)  # the client of an object store starts threads
    try:
        done = read_done(settings.checkpoints, settings.config, run_id=settings.run_id)
    except CheckpointMismatchError as error:
        return end(settings, failed(describe(error, node=settings.node)), stop=stop)
    if done is not None:
        message = (
            f"run {settings.run_id} is already complete; on a cluster, change the annotation {RUN} "
            "to start another one"
        )
        log.warn("done", step=done.get("step"), message=message)
        return end(settings, {**success(step=done.get("step")), "message": message}, stop=stop)
    if pipe is None:
        pipe = _start_forkservers(settings)
    procs = count_procs(settings.config)
    health: list[Any] = []
    exporter = start_exporter(
        settings, procs, healthy=lambda: not health or health[0].is_healthy(), since=started_at
    )
    status = TrainJobStatusReporter(exporter.status)
    with closing(LogRelay(settings.scratch, ranks=procs, copy=_keep_log(settings))) as relay:
        run = partial(_run_agent, settings, procs, exporter, relay, stop, predecessors, health)
        record = _run_to_record(settings, run)
        forkserver.close_script_forkserver()
        tracker = health[0].tracker if health else None
        health.clear()  # an agent whose work is over counts as healthy
        code = end(settings, record, stop=stop, exporter=exporter, tracker=tracker, status=status)
    clean_temp(settings.scratch)
    del pipe
    return code


def _start_forkservers(settings: Settings) -> Any:
    """Prepare this process, and start what forks the workers, before anything that starts a thread;
    returns the parent-death pipe.
    """
    pipe = _setup_process(settings)
    if settings.config.train is not None:
        forkserver.start_worker_forkserver()
    forkserver.start_script_forkserver(settings)
    # Here, before the agent answers: `startupProbe` allows for a long import, `livenessProbe` not.
    # The forkserver of scripts imports torch at the same time.
    forkserver.import_all(forkserver.AGENT_MODULES)
    return pipe


def _keep_log(settings: Settings) -> KeptLog | None:
    """The copy of this node's log next to the checkpoints, if the job wants one and has any."""
    config = settings.config
    if settings.checkpoints is None or not config.logs.max_bytes:
        return None
    return KeptLog(
        settings.checkpoints,
        place_of(settings.node),
        max_bytes=config.logs.max_bytes,
        secrets=read_secrets(config.secret_variables, os.environ),
    )


def _run_to_record(settings: Settings, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run the elastic agent; returns the exit record, also if an error ended it."""
    try:
        return run()
    except KdistTrainerError as error:
        cause, code, message = error.cause, error.code, str(error)
    except StopRequested:
        return stopped("stopped before the rendezvous", step=None)
    except Exception as error:  # noqa: BLE001 - every error must get an exit record and an exit code
        with suppress(OSError):
            traceback.print_exc()
        is_storage = classify(error)[0] is Cause.STORAGE or not settings.scratch.exists()
        cause = Cause.STORAGE if is_storage else Cause.UNKNOWN
        full = describe_full(settings.written_folders, has="had") if is_storage else ""
        message = f"{full and f'{full}; '}the agent failed: {type(error).__name__}: {error}"
        code = CODES[cause]
    return failed(Failure.of_node(cause, code, message, node=settings.node))


def _setup_process(settings: Settings) -> liveness.ParentDeathPipe:
    """Make the process a session leader that dies with `kdist run`, and set the workers'
    environment.
    """
    with suppress(PermissionError):  # it is a leader already
        os.setsid()
    process_tree.adopt()  # orphans of workers become children of this agent, which kills them
    if settings.parent_pipe is not None:
        liveness.watch(settings.parent_pipe)
    own = liveness.ParentDeathPipe.create(settings.own_pipe)
    os.environ.update(settings.environment())
    for name, interface in name_interfaces(settings).items():
        os.environ.setdefault(name, interface)
    limit_threads(settings.config)
    if settings.config.script is not None:
        os.environ.setdefault("KDIST_COLLECTIVE_TIMING", settings.config.script.collective_timing)
        if settings.config.script.progress is not None:
            os.environ["KDIST_PROGRESS"] = settings.config.script.progress.pattern
        os.environ.setdefault("KDIST_TRACKER_IDENTITY", settings.config.script.tracker_identity)
    if settings.config.memory_snapshot == "on":
        os.environ["KDIST_MEMORY_SNAPSHOT"] = "on"
    compile_cache.set_variables(settings)
    # StopSignals handles SIGTERM and SIGINT
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"
    clean_temp(settings.scratch)
    (settings.scratch / "torchelastic").mkdir()
    tempfile.tempdir = str(make_tempdir(settings.scratch))
    return own


def _run_agent(
    settings: Settings,
    procs: int,
    exporter: Exporter,
    relay: LogRelay,
    stop: StopSignals,
    predecessors: set[int],
    health: list[Any],
) -> dict[str, Any]:
    """Run the elastic agent and everything else that needs torch; returns the exit record."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from kdist_trainer.agent.agent import ElasticAgent, open_handler, open_stores
    from kdist_trainer.agent.coordination import AgentStore
    from kdist_trainer.agent.monitor import AgentTelemetry
    from kdist_trainer.agent.worker_group import run_worker
    from kdist_trainer.rendezvous.state import open_key
    from kdist_trainer.rendezvous.torch_internals import replace_script_start

    telemetry = AgentTelemetry(exporter, relay, settings, procs=procs)
    # kdist's events report the same as torch's agent
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).disabled = True
    with stop.interruptible():
        stores = open_stores(settings, stop)
        handler = open_handler(settings, stores, predecessors=predecessors)
        if (scripts := forkserver.running_script_forkserver()) is not None:
            replace_script_start(scripts.start_script)
            scripts.wait_until_ready()  # the others do not wait for a node that has not joined yet
        if settings.endpoint.scheme == KUBERNETES:
            compile_cache.open_archive(settings, partial(open_key(stores.retrying).token, COMPILED))
    script = settings.config.script
    spec = WorkerSpec(
        role="default",
        local_world_size=procs,
        rdzv_handler=handler,
        entrypoint=run_worker if script is None else sys.executable,
        args=(*forkserver.RUN_SCRIPT, *script.command) if script else (settings.entrypoint,),
        max_restarts=settings.config.restart_limit,
        monitor_interval=_MONITOR_SECONDS,
    )
    if script is not None and settings.code is not None:
        os.chdir(settings.code)
    agent_store, fail_fast_store = (
        AgentStore(store, run_id=settings.rendezvous_run_id, node=settings.node)
        for store in (stores.retrying, stores.fail_fast)
    )
    agent = ElasticAgent(
        spec,
        settings,
        agent_store=agent_store,
        fail_fast_store=fail_fast_store,
        telemetry=telemetry,
        stop=stop,
    )
    health.append(agent)
    agent.run()
    if not Exit(agent.record["code"]).retryable:
        stores.release(agents=agent.group_size)
    return agent.record
