"""The process that gives the run's curve to a tracker, next to the agent of group rank 0. It is the
program of a slice, `python -m kdist_trainer.tracker`, and nothing waits for it but the agent's end.
A tracker has one writer: the process ends with the group, since another node may begin the next.
"""

from __future__ import annotations

import os
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
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.errors import ConfigError
from kdist_trainer.formats.userinfo import hide_userinfo
from kdist_trainer.processes import process_tree
from kdist_trainer.processes.signals import StopSignals, kill_deadline
from kdist_trainer.processes.threads import BoundedCalls, OnError, start_thread

PACKAGES: Final = {"wandb": "wandb>=0.31", "mlflow": "mlflow-skinny>=3.17"}
_END_SECONDS: Final = 30.0
"""How long the end of a run waits for what the tracker has not been given yet."""
_END_POLL_SECONDS: Final = 0.2
_RECORD_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 120.0
_QUIET: Final = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}

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
        self._is_wanted, self._retry_at = False, 0.0
        train = settings.config.train
        self._tracker = train.tracker if train is not None else None
        if self._tracker is not None and find_spec(self._tracker) is None:
            package = f"the package {self._tracker}: pip install '{PACKAGES[self._tracker]}'"
            raise ConfigError(f"train.tracker: {self._tracker} needs {package}")

    def begin_group(self, *, is_group_rank_0: bool) -> None:
        """Start the process if it belongs here."""
        has_ledger = self._settings.checkpoints is not None
        self._is_wanted = self._tracker is not None and has_ledger and is_group_rank_0
        self._retry_at = 0.0
        if not self._is_wanted:
            self.kill()
        self.tend()

    def tend(self) -> None:
        """Start the process if it belongs here and does not run; if it has died, after a while."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._fail(f"the tracker exited with code {code} and will be restarted")
        if self._is_wanted and self._process is None and time.monotonic() >= self._retry_at:
            self._start()

    def _start(self) -> None:
        command, pipe = [sys.executable, "-P", "-m", "kdist_trainer.tracker"], subprocess.PIPE
        environment = {**os.environ, **_QUIET}
        try:
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True
            )
        except OSError as error:
            self._fail(f"cannot start the tracker: {error}")
            return
        self._process = process
        _started.add(process.pid)
        try:
            start_thread(partial(self._read, process), name="tracker", on_error=OnError.REPORT)
        except RuntimeError as error:  # no thread is left
            self._fail(f"cannot start the tracker: {error}")

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            if line.startswith(b"http"):  # libraries print too
                self._show(hide_userinfo(line.decode(errors="replace").strip()))

    def _fail(self, message: str) -> None:
        log.warn("tracker-failed", message=message)
        self.kill()
        self._retry_at = time.monotonic() + _RETRY_SECONDS

    def end(self, stop: StopSignals) -> None:
        """Have it send what is left, for a while, and end; if it does not run, another one."""
        if self._is_wanted and not stop.urgent:
            if self._process is not None and self._process.poll() is not None:
                self.kill()
            self._retry_at = 0.0
            self.tend()
        root = self._settings.checkpoints
        if root is not None and self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            if not self._wait(self._process, stop):
                self._fail("the tracker did not receive all steps of the run")
                calls = BoundedCalls("the run ledger", seconds=_RECORD_SECONDS)
                with suppress(OSError, RuntimeError):  # for the report
                    calls.call(partial(RunLedger(root).append, "tracker-behind"))
        self.kill()

    def _wait(self, process: subprocess.Popen[bytes], stop: StopSignals) -> bool:
        """Whether it ends without a fault in time, which a request to stop shortens."""
        deadline = time.monotonic() + _END_SECONDS
        while not stop.urgent and time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_END_POLL_SECONDS) == 0
            if stop.requested_at is not None:
                grace = self._settings.config.termination_grace_period_seconds
                deadline = min(deadline, kill_deadline(stop.requested_at, grace))
        return False

    def kill(self) -> None:
        """End it at once: the next one sends what this one has not."""
        if self._process is not None:
            if self._process.poll() is None:
                process_tree.kill(below=[self._process.pid])
            _started.discard(self._process.pid)
            self._process = None
