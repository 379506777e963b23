"""Exit codes and failure causes, shared by agents, ranks and the command line."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Exit(IntEnum):
    """Exit codes of an agent. By the ExitCode policy of Kubeflow's training operator, codes below
    128 are permanent failures and codes from 128 on are retryable.
    """

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

    @property
    def retryable(self) -> bool:
        """Whether a restart may help."""
        return self >= 128


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
    UNKNOWN = "unknown"
