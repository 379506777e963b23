"""How long an agent waits before the next worker group, and for what: the restarts that are left
would otherwise be used up in seconds, or a training repeated for a disk that is still full.
"""

from __future__ import annotations

import time
from typing import Final

from kdist_trainer import log
from kdist_trainer.agent.restart_policy import RestartLedger
from kdist_trainer.agent.telemetry import AgentTelemetry
from kdist_trainer.signals import StopSignals

FULL_SECONDS: Final = 60
"""How long it waits at least for room on a full disk, before which another try must fail too."""
_MAX_FULL_SECONDS: Final = 600
_POLL_SECONDS: Final = 0.2


def back_off(ledger: RestartLedger, telemetry: AgentTelemetry, stop: StopSignals) -> None:
    """Wait if the disk refuses writes or the same failure repeats: until the time is over, there is
    room on the disk that was full, or somebody asks for a stop.
    """
    latest = ledger.read_latest_generation()
    refused, repeated = ledger.storage_backoff_seconds(), ledger.failure_backoff_seconds(latest)
    if "kept_step" in latest:
        refused = 0  # nothing is lost by going on, and no storage is needed for it
        full = ""
    else:
        full = telemetry.find_full() if refused or ledger.has_failed_to_save(latest) else ""
    seconds = refused or repeated
    if full:
        seconds = min(_MAX_FULL_SECONDS, FULL_SECONDS * max(1, refused, repeated))
        name, what, wait = "storage-unavailable", full, f"waits for room, retrying in {seconds} s"
    elif refused:
        what, wait = "the checkpoint volume is not writable", f"retrying in {seconds} s"
        name = "storage-unavailable"
    elif repeated:
        name, what, wait = "backing-off", "the same failure again", f"retrying in {seconds} s"
    else:
        return
    log.warn(name, message=f"{what}; {wait}")
    # of a full disk `/status` says the rest, and a text of a path may be too long for it
    with telemetry.waiting_for(wait if full else f"{what}; {wait}"):
        _sleep(seconds, telemetry, stop, is_full=bool(full))


def _sleep(seconds: float, telemetry: AgentTelemetry, stop: StopSignals, *, is_full: bool) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not stop.requested:
        if is_full and not telemetry.find_full():
            return
        time.sleep(min(left, _POLL_SECONDS))
