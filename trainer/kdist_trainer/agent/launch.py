"""One agent from start to end: its surroundings first, then torch, then the loop; the exit record last."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from typing import Any

from kdist_trainer import descendants, lifeline, log
from kdist_trainer.agent import forkserver
from kdist_trainer.agent.ending import end, start_exporter
from kdist_trainer.agent.outcome import failed, read_done, stopped, success
from kdist_trainer.agent.relay import Relay
from kdist_trainer.agent.settings import Settings, clear_litter, count_procs, make_tempdir, prepare_scratch
from kdist_trainer.agent.stopping import StopRequested, StopSignals
from kdist_trainer.agent.telling import Teller
from kdist_trainer.config import Cause, Exit
from kdist_trainer.failure import Failure, KdistTrainerError, Mismatch, classify, describe

_MONITOR_SECONDS = 0.1
RUN = "kdist.dev/run"


def launch(settings: Settings) -> int:
    """Be the agent of one node until its work is over; returns the exit code. Raises `OSError` if it cannot even begin."""
    began = time.monotonic()
    log.bind(job=settings.config.name, node=settings.node)
    predecessors = prepare_scratch(settings)
    stop = StopSignals()
    stop.install()
    try:
        done = read_done(settings.checkpoints, settings.config, run_id=settings.run_id)
    except Mismatch as error:
        return end(settings, failed(describe(error, node=settings.node)), stop=stop)
    if done is not None:
        message = (
            f"run {settings.run_id} has ended before: nothing is left to do; on a cluster the annotation {RUN} begins another"
        )
        log.warn("done", step=done.get("step"), message=message)
        return end(settings, {**success(step=done.get("step")), "message": message}, stop=stop)
    # Closed by the kernel when this process ends: held to the last, so that nothing of it outlives it.
    held = _arrange_life(settings)
    if settings.config.train is not None:
        forkserver.start()  # before anything that starts a thread
    procs = count_procs(settings.config)
    health: list[Any] = []
    exporter = start_exporter(settings, procs, healthy=lambda: not health or health[0].is_healthy(), since=began)
    with Relay(settings.scratch, ranks=procs) as relay:
        teller = Teller(
            exporter,
            relay,
            max_restarts=settings.config.max_restarts,
            managed=settings.config.train is not None,
        )
        record = _conclude(settings, procs, teller, stop, predecessors, health)
        health.clear()  # an agent whose work is over is well
        code = end(settings, record, stop=stop, exporter=exporter)
    clear_litter(settings.scratch)
    del held
    return code


def _conclude(
    settings: Settings,
    procs: int,
    teller: Teller,
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


def _arrange_life(settings: Settings) -> lifeline.Lifeline:
    """Lead a process group of one's own, die with `kdist run`, and tell the ranks where they are and how to die."""
    with suppress(PermissionError):  # started as a leader already
        os.setsid()
    descendants.adopt()  # what a rank leaves behind becomes this agent's to end
    if settings.lifeline is not None:
        lifeline.watch(settings.lifeline)
    own = lifeline.Lifeline.create(settings.own_lifeline)
    os.environ.update(settings.environment())
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.config.threads_per_rank))
    if settings.config.script is not None:
        os.environ.setdefault("KDIST_COMM_HOOK", settings.config.script.comm_hook)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"  # SIGTERM and SIGINT are taken by StopSignals
    clear_litter(settings.scratch)
    (settings.scratch / "torchelastic").mkdir()
    tempfile.tempdir = str(make_tempdir(settings.scratch))
    return own


def _work(
    settings: Settings, procs: int, teller: Teller, stop: StopSignals, predecessors: set[int], health: list[Any]
) -> dict[str, Any]:
    """Everything that needs torch; returns the exit record."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from kdist_trainer.agent.elastic import Agent
    from kdist_trainer.agent.entry import enter
    from kdist_trainer.agent.exchange import Exchange
    from kdist_trainer.agent.meeting import open_handler, open_stores

    _quieten()
    config = settings.config
    with stop.interruptible():
        stores = open_stores(settings, stop)
        handler = open_handler(settings, stores, predecessors=predecessors)
    script = config.script
    spec = WorkerSpec(
        role="default",
        local_world_size=procs,
        rdzv_handler=handler,
        entrypoint=enter if script is None else sys.executable,
        args=(settings.entrypoint,) if script is None else ("-u", "-m", "kdist_trainer.script", *script.command),
        max_restarts=config.max_restarts,
        monitor_interval=_MONITOR_SECONDS,
    )
    if script is not None and settings.code is not None:
        os.chdir(settings.code)
    patient, hasty = (Exchange(store, run_id=settings.meeting, node=settings.node) for store in (stores.patient, stores.hasty))
    agent = Agent(spec, settings, exchange=patient, hasty=hasty, teller=teller, stop=stop, start_method="forkserver")
    health.append(agent)
    agent.run()
    if not Exit(agent.record["code"]).retryable:
        stores.take_leave(agents=agent.group_size)
    return agent.record


def _quieten() -> None:
    """The account that torch gives of its agent is told better by our events."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).disabled = True
