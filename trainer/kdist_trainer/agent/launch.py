"""One agent from start to end: its surroundings first, then torch, then the loop; the exit record last."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdist_trainer import lifeline, log
from kdist_trainer.agent import forkserver
from kdist_trainer.agent.outcome import failed, read_done, success, write_record
from kdist_trainer.agent.settings import Settings, clear_litter, count_procs, make_tempdir, prepare_scratch
from kdist_trainer.agent.stopping import StopSignals
from kdist_trainer.agent.telling import Teller
from kdist_trainer.config import Cause, Exit
from kdist_trainer.exporter import Exporter
from kdist_trainer.failure import ConfigProblem, Failure, KdistTrainerError
from kdist_trainer.rendezvous.place import FILE, parse

_MONITOR_SECONDS = 0.1
_STORE_SECONDS = 10.0
"""How long an agent waits for a word that another one owes it; then the other one is taken for lost and they meet anew."""


def launch(settings: Settings) -> int:
    """Be the agent of one node until its work is over; returns the exit code. Raises `OSError` if it cannot even begin."""
    began = time.monotonic()
    log.bind(job=settings.config.name, node=settings.node)
    predecessor = prepare_scratch(settings)
    done = read_done(settings.checkpoints, run_id=settings.run_id)
    if done is not None:
        log.event("done", step=done.get("step"), message="the run has ended before")
        write_record(success(step=done.get("step")), settings.scratch, settings.termination_message)
        return Exit.DONE
    stop = StopSignals()
    stop.install()
    # Closed by the kernel when this process ends: held to the last, so that nothing of it outlives it.
    held = _arrange_life(settings)
    if settings.config.train is not None:
        forkserver.start()  # before anything that starts a thread
    procs = count_procs(settings.config)
    health: list[Any] = []
    exporter = _start_exporter(settings, procs, lambda: not health or health[0].is_healthy(), began)
    teller = Teller(exporter, max_restarts=settings.config.max_restarts)
    try:
        record = _work(settings, procs, teller, stop, predecessor, health)
    except KdistTrainerError as error:
        record = failed(Failure(error.cause, error.code, True, str(error), node=settings.node, time=time.time()))
    except Exception as error:  # noqa: BLE001 - whatever it is, the record and the exit code must say so
        traceback.print_exc()
        message = f"the agent failed: {type(error).__name__}: {error}"
        record = failed(Failure(Cause.UNKNOWN, Exit.PEERS_LOST, True, message, node=settings.node, time=time.time()))
    _report(settings, record, teller)
    if record["code"] == Exit.DONE:
        _linger(settings.config.metrics_linger_seconds, stop)
    exporter.close()
    clear_litter(settings.scratch)
    del held
    return int(record["code"])


def _arrange_life(settings: Settings) -> lifeline.Lifeline:
    """Lead a process group of one's own, die with `kdist run`, and tell the ranks where they are and how to die."""
    with suppress(PermissionError):  # started as a leader already
        os.setsid()
    if settings.lifeline is not None:
        lifeline.watch(settings.lifeline)
    own = lifeline.Lifeline.create(settings.own_lifeline)
    os.environ.update(settings.environment())
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.config.threads_per_rank))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"  # SIGTERM and SIGINT are taken by StopSignals
    clear_litter(settings.scratch)
    (settings.scratch / "torchelastic").mkdir()
    tempfile.tempdir = str(make_tempdir(settings.scratch))
    return own


def _start_exporter(settings: Settings, procs: int, healthy: Any, since: float) -> Exporter:
    config = settings.config
    info = {
        "node": settings.node,
        "framework": config.train.strategy if config.train else "script",
        "workload_kind": config.train.workload if config.train else "script",
        "world_size_min": str(config.nodes.min * procs),
        "world_size_max": str(config.max_world_size(procs)),
    }
    host = "127.0.0.1" if settings.rendezvous.startswith("file:") else "0.0.0.0"  # noqa: S104 - Prometheus comes from outside the pod
    exporter = Exporter(
        job=config.name,
        run_id=settings.run_id,
        socket_path=settings.socket,
        port=settings.port,
        host=host,
        info=info,
        healthy=healthy,
        since=since,
    )
    exporter.start()
    document = {"pid": os.getpid(), "port": exporter.port, "node": settings.node, "run_id": settings.run_id}
    fresh = settings.scratch / "agent.json.new"
    fresh.write_text(json.dumps(document))
    fresh.replace(settings.scratch / "agent.json")
    return exporter


def _work(
    settings: Settings, procs: int, teller: Teller, stop: StopSignals, predecessor: int | None, health: list[Any]
) -> dict[str, Any]:
    """Everything that needs torch; returns the exit record."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from kdist_trainer.agent.elastic import Agent
    from kdist_trainer.agent.entry import enter
    from kdist_trainer.agent.exchange import Exchange
    from kdist_trainer.rendezvous.dynamic import open_rendezvous
    from kdist_trainer.rendezvous.file import FileStore

    _quieten()
    config = settings.config
    place = parse(settings.rendezvous)
    if place.scheme != FILE:
        raise ConfigProblem(f"there is no rendezvous {place.scheme!r} yet (there is: file)")
    store = FileStore(Path(place.where[0]), timeout_seconds=_STORE_SECONDS)
    handler = open_rendezvous(
        store,
        run_id=settings.run_id,
        min_nodes=config.nodes.min,
        max_nodes=config.nodes.max,
        address=settings.address or ("127.0.0.1" if place.scheme == FILE else None),
        timeout_seconds=config.rendezvous_timeout_seconds,
    )
    if predecessor is not None:
        handler.evict(predecessor)
    script = config.script
    spec = WorkerSpec(
        role="default",
        local_world_size=procs,
        rdzv_handler=handler,
        entrypoint=enter if script is None else sys.executable,
        args=(settings.entrypoint,) if script is None else ("-u", "-m", "kdist_trainer.script", script.path, *script.args),
        max_restarts=config.max_restarts,
        monitor_interval=_MONITOR_SECONDS,
    )
    if script is not None and settings.code is not None:
        os.chdir(settings.code)
    exchange = Exchange(store, run_id=settings.run_id, node=settings.node)
    agent = Agent(spec, settings, exchange=exchange, teller=teller, stop=stop, start_method="forkserver")
    health.append(agent)
    agent.run()
    return agent.record


def _quieten() -> None:
    """The account that torch gives of its agent is told better by our events."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).disabled = True


def _report(settings: Settings, record: dict[str, Any], teller: Teller) -> None:
    write_record(record, settings.scratch, settings.termination_message)
    if record["code"] in (Exit.DONE, Exit.STOPPED):
        teller.state("succeeded")
    else:
        teller.state("failed")
        fields = {name: record.get(name) for name in ("cause", "code", "rank", "step", "traceback", "message")}
        log.error("failed", node=record.get("node") or settings.node, **fields)


def _linger(seconds: float, stop: StopSignals) -> None:
    """Answer scrapes for a while after success, until asked to stop."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stop.requested:
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
