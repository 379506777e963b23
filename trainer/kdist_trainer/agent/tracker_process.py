"""The process that gives the run's curve to a tracker, next to the agent of group rank 0. It is the
program of a slice, `python -m kdist_trainer.tracker`, and nothing waits for it but the agent's end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Final

from kdist_trainer import log
from kdist_trainer.agent.settings import Settings
from kdist_trainer.errors import ConfigError
from kdist_trainer.processes import process_tree
from kdist_trainer.processes.signals import StopSignals, kill_deadline
from kdist_trainer.processes.threads import OnError, start_thread

PACKAGES: Final = {"wandb": "wandb>=0.31", "mlflow": "mlflow-skinny>=3.17"}
_END_SECONDS: Final = 30.0
"""How long the end of a run waits for what the tracker has not been given yet."""

_started: set[int] = set()


def pids() -> set[int]:
    """The running processes of this agent, which have children of their own."""
    return set(_started)


class TrackerProcess:
    """The process, if the job has a tracker; `show` is told the address of the run."""

    def __init__(self, settings: Settings, show: Callable[[str], None]) -> None:
        """Prepare it. Raises `ConfigError` if the tracker's package is not installed."""
        self._settings, self._show = settings, show
        self._process: subprocess.Popen[bytes] | None = None
        train = settings.config.train
        self._tracker = train.tracker if train is not None else None
        if self._tracker is not None and find_spec(self._tracker) is None:
            package = f"the package {self._tracker}: pip install '{PACKAGES[self._tracker]}'"
            raise ConfigError(f"train.tracker: {self._tracker} needs {package}")

    def begin_group(self, *, is_group_rank_0: bool) -> None:
        """Start the process here, unless it runs; or end it, since another agent starts one."""
        if self._process is not None and (not is_group_rank_0 or self._process.poll() is not None):
            self._kill()
        is_wanted = self._tracker is not None and self._settings.checkpoints is not None
        if not (is_wanted and is_group_rank_0) or self._process is not None:
            return
        command, pipe = [sys.executable, "-P", "-m", "kdist_trainer.tracker"], subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        except OSError as error:
            log.warn("tracker-failed", message=f"the tracker does not start: {error}")
            return
        self._process = process
        _started.add(process.pid)
        start_thread(partial(self._read, process), name="tracker", on_error=OnError.REPORT)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            self._show(line.decode(errors="replace").strip())

    def end(self, stop: StopSignals) -> None:
        """Have it send what is left, for a while, and end."""
        left = _END_SECONDS
        if stop.requested_at is not None:
            grace = self._settings.config.termination_grace_period_seconds
            left = min(left, kill_deadline(stop.requested_at, grace) - time.monotonic())
        if self._process is not None:
            self.begin_group(
                is_group_rank_0=True
            )  # if it has died: what is left is sent by another
        if self._process is not None and self._process.stdin is not None and not stop.urgent:
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, left))
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                process_tree.kill(below=[self._process.pid])
            _started.discard(self._process.pid)
            self._process = None
