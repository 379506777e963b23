"""A rank's part of a profile: torch's profiler around the next steps, then a trace and a summary of
it.

Nothing of it is in the loop's step: a rank that records has another `report`, which is called at
the end of every step anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kdist_trainer import log
from kdist_trainer.metrics.step_stats import Wall
from kdist_trainer.profiling import requests as requests
from kdist_trainer.profiling.requests import ProfileRequest
from kdist_trainer.training.context import TrainContext

_TOP = 30
_COMMUNICATION = ("gloo:", "nccl:", "ncclDevKernel")


def attach(run: TrainContext, *, scratch: Path | None, checkpoints: Path | None) -> None:
    """Accept profile requests in the agent's folder; traces are stored in the checkpoint folder, or
    in the agent's if there is none.
    """
    run.inbox = requests.inbox(scratch) if scratch is not None else None
    run.traces = checkpoints or scratch


def asked(run: TrainContext) -> bool:
    """Whether this rank's agent has received a profile request since the last profile. Costs one
    file system check.
    """
    return run.inbox is not None and run.state.step >= run.profiled_until and run.inbox.exists()


def start_profile(run: TrainContext) -> None:
    """Read the request and record from the next step on. Collective: called on all ranks at the
    same step.
    """
    own = requests.take(run.inbox) if run.inbox is not None and asked(run) else None
    found = next((one for one in run.world.all_gather_object(own) if one is not None), None)
    if found is None:
        return
    run.profiled_until = run.state.step + found.steps
    root = run.traces
    if root is None:
        return
    ranks = [rank for rank in range(run.world.size) if found.includes(rank)]
    try:
        if run.world.is_leader:
            log.event(
                "profile", name=found.name, step=run.state.step + 1, steps=found.steps, ranks=ranks
            )
            last = min(run.target, run.profiled_until)
            requests.announce(root, found, ranks=ranks, first=run.state.step + 1, last=last)
        if run.world.rank in ranks:
            ProfileRecording(run, found, requests.folder_of(root, found.name)).start()
    except OSError as error:
        log.warn("profile-failed", error=str(error))


class ProfileRecording:
    """Records until the requested steps, or the run, are done."""

    def __init__(self, run: TrainContext, request: ProfileRequest, folder: Path) -> None:
        self._run = run
        self._request = request
        self._folder = folder
        self._report: Callable[[], None] = run.report
        self._left = min(request.steps, run.target - run.state.step)
        devices = [ProfilerActivity.CUDA] if run.world.device.type == "cuda" else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *devices], acc_events=True)
        self._began = 0.0
        self._first = run.state.step + 1

    def start(self) -> None:
        """Start recording."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run.report = self._after_step
        self._profiler.start()
        self._began = time.perf_counter()

    def _after_step(self) -> None:
        self._report()
        self._left -= 1
        if self._left > 0:
            self._profiler.step()
            return
        self._run.report = self._report
        if self._run.world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        self._profiler.stop()
        try:
            self._keep(seconds)
        except OSError as error:
            log.warn("profile-failed", error=str(error))
        self._run.stats.add_wall(Wall.IDLE, self._run.laps.skip())

    def _keep(self, seconds: float) -> None:
        rank, last = self._run.world.rank, self._first + self._request.steps - 1
        self._profiler.export_chrome_trace(str(self._folder / requests.trace_name(rank)))
        summary = {
            "rank": rank,
            "first": self._first,
            "last": min(last, self._run.target),
            "seconds": round(seconds, 6),
        }
        requests.finish(self._folder, rank, summary | summarize(self._profiler))


def summarize(profiler: profile) -> dict[str, Any]:
    """Summary of a profile: seconds with a collective in flight, and the operations with the
    largest self time.
    """
    events = profiler.events() or []  # type: ignore[no-untyped-call]
    spans = [
        (each.time_range.start, each.time_range.end)
        for each in events
        if each.name.startswith(_COMMUNICATION)
    ]
    averages = [
        each
        for each in profiler.key_averages()
        if not each.key.startswith(("ProfilerStep", *_COMMUNICATION))
    ]
    averages.sort(key=lambda each: -(each.self_device_time_total or each.self_cpu_time_total))
    operations = [
        {
            "name": each.key[:80],
            "calls": each.count,
            "cpuSeconds": round(each.self_cpu_time_total / 1e6, 6),
            "deviceSeconds": round(each.self_device_time_total / 1e6, 6),
        }
        for each in averages[:_TOP]
    ]
    return {"communicationSeconds": round(union(spans) / 1e6, 6), "operations": operations}


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Total length covered by the intervals."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
