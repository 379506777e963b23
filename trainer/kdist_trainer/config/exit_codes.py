"""Exit codes and failure causes, shared by agents, ranks and the command line: which code a cause
has, and whose fault it is. The words for causes are `GENERAL` in `causes/row.py`, those for codes
in `tools/reference/exit_codes.py`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

from kdist_trainer.formats import FIRST_RETRYABLE_CODE


class Exit(IntEnum):
    """Exit codes of an agent, on either side of `FIRST_RETRYABLE_CODE`."""

    DONE = 0
    CONFIG = 64
    DATA = 65
    USER = 70
    DEVICE_OOM = 71
    HOST_OOM = 72
    MISMATCH = 73
    NONFINITE = 74
    BUDGET = 75
    STOPPED = 200
    PEERS_LOST = 201
    HANG = 202
    STORAGE = 203
    DEVICE = 204
    NODE = 205
    RETRY = 206
    UNKNOWN = 207

    @property
    def retryable(self) -> bool:
        """Whether a restart may help."""
        return self >= FIRST_RETRYABLE_CODE


class Cause(StrEnum):
    """Why a rank, an agent or a job ended: a bounded set, safe as a metric label."""

    USER_CODE = "user_code"
    OOM_HOST = "oom_host"
    OOM_DEVICE = "oom_device"
    HANG = "hang"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    COLLECTIVE_MISMATCH = "collective_mismatch"
    NAN = "nan"
    SIGNAL = "signal"
    NODE_LOST = "node_lost"
    PREEMPTED = "preempted"
    STORAGE = "storage"
    MISMATCH = "mismatch"
    RENDEZVOUS = "rendezvous"
    CONFIG = "config"
    PREFLIGHT = "preflight"
    DATA = "data"
    BUDGET = "budget"
    DEADLINE = "deadline"
    DEVICE = "device"
    NODE = "node"
    NETWORK = "network"
    LOADER = "loader"
    EARLY_EXIT = "early_exit"
    RETRY = "retry"
    UNKNOWN = "unknown"


class Fault(StrEnum):
    """Whose fault a failure is: a bounded set."""

    USER = "user"
    DATA = "data"
    DEVICE = "device"
    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    KDIST = "kdist"
    UNKNOWN = "unknown"


class Rerun(StrEnum):
    """How a run may be started again after a failure."""

    AGAIN = "again"
    """As it was."""
    FIXED = "fixed"
    """After a change: unchanged it must fail again."""
    BLOCKING = "blocking"
    """With CUDA_LAUNCH_BLOCKING=1, which shows the line of a kernel that fails."""


CODES = {
    Cause.CONFIG: Exit.CONFIG,
    Cause.DATA: Exit.DATA,
    Cause.USER_CODE: Exit.USER,
    Cause.OOM_DEVICE: Exit.DEVICE_OOM,
    Cause.OOM_HOST: Exit.HOST_OOM,
    Cause.MISMATCH: Exit.MISMATCH,
    Cause.NAN: Exit.NONFINITE,
    Cause.STORAGE: Exit.STORAGE,
    Cause.NODE_LOST: Exit.PEERS_LOST,
    Cause.COLLECTIVE_TIMEOUT: Exit.HANG,
    Cause.DEVICE: Exit.DEVICE,
    Cause.NODE: Exit.NODE,
    Cause.RETRY: Exit.RETRY,
    Cause.UNKNOWN: Exit.UNKNOWN,
}
"""The exit code of a rank that failed by a cause, and so the cause that its exit code stands for if
its failure could not be written. Causes that are not here share a code with one of these.
"""
FAULTS = {
    Cause.CONFIG: Fault.USER,
    Cause.USER_CODE: Fault.USER,
    Cause.OOM_DEVICE: Fault.USER,
    Cause.OOM_HOST: Fault.USER,
    Cause.COLLECTIVE_MISMATCH: Fault.USER,
    Cause.EARLY_EXIT: Fault.USER,
    Cause.NAN: Fault.USER,
    Cause.RETRY: Fault.USER,
    Cause.DEADLINE: Fault.USER,
    Cause.DATA: Fault.DATA,
    Cause.MISMATCH: Fault.DATA,
    Cause.DEVICE: Fault.DEVICE,
    Cause.NODE: Fault.NODE,
    Cause.PREEMPTED: Fault.NODE,
    Cause.NETWORK: Fault.NETWORK,
    Cause.NODE_LOST: Fault.NETWORK,
    Cause.RENDEZVOUS: Fault.NETWORK,
    Cause.PREFLIGHT: Fault.NETWORK,
    Cause.STORAGE: Fault.STORAGE,
}
"""Whose fault a cause is where nothing says more; of the others it is unknown."""
