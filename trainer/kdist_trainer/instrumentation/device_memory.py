"""What a rank tells when its GPU is out of memory: where in a step it was, the peak, and with
`spec.memorySnapshot` the peaks of the phases of a managed training and a snapshot of what was
allocated by which lines.
"""

from __future__ import annotations

import os
import pickle
import traceback
from typing import Final

import torch

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.manifest import MEMORY
from kdist_trainer.config import Cause
from kdist_trainer.errors import classify
from kdist_trainer.formats import SCRATCH
from kdist_trainer.instrumentation import torch_internals
from kdist_trainer.metrics.rank_metrics import StepPhase
from kdist_trainer.processes.threads import BoundedCalls

VARIABLE: Final = "KDIST_MEMORY_SNAPSHOT"
_WRITE_SECONDS: Final = 10.0
_CALLS: Final = {"step": "/torch/optim/", "backward": "/torch/", "_call_impl": "/torch/nn/modules/"}
_WHERE: Final = {"step": "the optimizer's step", "backward": "the backward pass"}

_peaks: dict[StepPhase, int] = {}


def record_history() -> None:
    """Have torch record allocations from the start of its GPU, if the job wants a snapshot."""
    if VARIABLE in os.environ:
        torch_internals.record_memory_history()


def record_phase_peak(phase: StepPhase) -> None:
    """Note the peak of a phase that ends now, if the job wants a snapshot."""
    if VARIABLE in os.environ and _has_gpu():
        _peaks[phase] = max(_peaks.get(phase, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


def explain(error: BaseException) -> str:
    """A sentence about an error that says that a GPU is out of memory; empty for others."""
    if classify(error)[0] is not Cause.OOM_DEVICE:
        return ""
    parts = [f"in {where}" for where in [find_phase(error)] if where]
    if VARIABLE not in os.environ:
        parts.append('set spec.memorySnapshot: "on" to get a memory snapshot next time')
    try:
        if _has_gpu():
            phases = [f"{phase.name.lower()} {_show(each)}" for phase, each in _peaks.items()]
            peak = max([torch.cuda.max_memory_allocated(), *_peaks.values()])
            parts.append(", ".join([f"peak of allocated memory {_show(peak)}", *phases]))
            if VARIABLE in os.environ:
                # storage that does not answer must not hold the rank, and its peers with it
                calls = BoundedCalls("the folder of snapshots", seconds=_WRITE_SECONDS)
                path = calls.call(_write_snapshot)
                parts.append(f"snapshot for pytorch.org/memory_viz: {path}")
    except Exception as failure:  # noqa: BLE001 - the error that ends the rank matters more
        parts.append(f"no snapshot: {type(failure).__name__}: {failure}")
    return "; ".join(parts)


def _has_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def find_phase(error: BaseException) -> str:
    """Where in a step it was raised, by the outermost of torch's calls; empty if in none."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name in _CALLS and _CALLS[code.co_name] in code.co_filename:
            return _WHERE.get(code.co_name, "the forward pass")
    return ""


def _write_snapshot() -> str:
    root = storage.open_location(os.environ.get("KDIST_CHECKPOINTS") or os.environ[SCRATCH])
    path = root / MEMORY / f"rank-{os.environ.get('RANK', '0')}.pickle"
    storage.make_folder(root / MEMORY)
    storage.replace(path, pickle.dumps(torch_internals.take_memory_snapshot()))
    return str(path)


def _show(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
