"""A rank's part of a profile on request: torch's profiler around the next steps, then a trace and a
summary of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kdist_trainer import log
from kdist_trainer.checkpoint.storage import FOLDER_MODE
from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation.step_timer import StepTimer, union_length
from kdist_trainer.metrics.rank_metrics import StepStats, WallCategory
from kdist_trainer.profiling import requests
from kdist_trainer.profiling.requests import ProfileRequest
from kdist_trainer.training.training_state import TrainState

_CHECK_SECONDS = 0.02
_MAX_OPERATIONS = 30
_COMMUNICATION = ("gloo:", "nccl:", "ncclDevKernel")


class Profiler:
    """Records the steps that profile requests to this rank's agent ask for."""

    def __init__(
        self,
        world: World,
        state: TrainState,
        stats: StepStats,
        step_timer: StepTimer,
        *,
        scratch: Path | None,
        checkpoints: Path | None,
    ) -> None:
        """Make a profiler that records nothing yet. `scratch` is the folder of the agent, where
        requests arrive; None to accept none. Traces are stored in the checkpoint folder, or in
        `scratch` if there is none.
        """
        self._world = world
        self._state = state
        self._stats = stats
        self._step_timer = step_timer
        self._inbox = requests.inbox(scratch) if scratch is not None else None
        self._root = checkpoints or scratch
        self._last_step = 0
        """The last step of the newest profile."""
        self._next_check = 0.0
        """In monotonic time."""
        self._recording: _Recording | None = None

    def is_requested(self) -> bool:
        """Whether this rank's agent has received a request since the last profile. Asks the file
        system, which takes as long as a tenth of a short step, only from time to time.
        """
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + _CHECK_SECONDS
        return self._has_request()

    def _has_request(self) -> bool:
        return (
            self._inbox is not None and self._state.step >= self._last_step and self._inbox.exists()
        )

    def start(self, target: int) -> None:
        """Read the request, and record from the next step to at most step `target`. Collective:
        called on all ranks at the same step.
        """
        own = (
            requests.take(self._inbox) if self._inbox is not None and self._has_request() else None
        )
        every = self._world.all_gather_object(own)
        request: ProfileRequest | None = next((one for one in every if one is not None), None)
        if request is None:
            return
        first = self._state.step + 1
        self._last_step = self._state.step + request.steps
        if self._root is None:
            return
        last = min(target, self._last_step)
        ranks = [rank for rank in range(self._world.size) if rank in (request.ranks or (rank,))]
        try:
            if self._world.is_rank_zero:
                log.event(
                    "profile", name=request.name, step=first, steps=request.steps, ranks=ranks
                )
                requests.write_plan(self._root, request, ranks=ranks, first=first, last=last)
            if self._world.rank in ranks:
                folder = requests.folder_of(self._root, request.name)
                self._recording = _Recording(self._world, folder, first, last)
        except OSError as error:
            log.warn("profile-failed", error=str(error))

    def after_step(self) -> None:
        """Advance the recording, if there is one; after its last step, write the trace."""
        if self._recording is not None and not self._recording.advance():
            self._recording = None
            self._stats.add_wall(WallCategory.IDLE, self._step_timer.exclude())

    def cancel(self) -> None:
        """Discard the recording in progress, if there is one."""
        if self._recording is not None:
            self._recording.cancel()
            self._recording = None


class _Recording:
    """A profile in progress, of the steps `first` to `last`."""

    def __init__(self, world: World, folder: Path, first: int, last: int) -> None:
        """Start recording. Raises `OSError` if the folder cannot be created."""
        self._world = world
        self._folder = folder
        self._first = first
        self._last = last
        self._remaining = last - first + 1
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        devices = [ProfilerActivity.CUDA] if world.device.type == "cuda" else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *devices], acc_events=True)
        self._profiler.start()
        self._started = time.perf_counter()

    def advance(self) -> bool:
        """Record that a step has ended; returns whether there is another one to record."""
        self._remaining -= 1
        if self._remaining > 0:
            self._profiler.step()
            return True
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        self._profiler.stop()
        rank = self._world.rank
        summary = {
            "rank": rank,
            "first": self._first,
            "last": self._last,
            "seconds": round(seconds, 6),
        }
        try:
            self._profiler.export_chrome_trace(str(self._folder / requests.trace_name(rank)))
            requests.write_summary(self._folder, rank, summary | summarize(self._profiler))
        except OSError as error:
            log.warn("profile-failed", error=str(error))
        return False

    def cancel(self) -> None:
        """Stop recording, and write nothing."""
        self._profiler.stop()


def summarize(profiler: profile) -> dict[str, Any]:
    """The time with a collective in flight, and the operations with the largest self time."""
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
        for each in averages[:_MAX_OPERATIONS]
    ]
    return {"communicationSeconds": round(union_length(spans) / 1e6, 6), "operations": operations}
