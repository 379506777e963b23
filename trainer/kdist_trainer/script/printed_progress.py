"""Reports the steps and losses that an unmodified script prints, as its `Reporter` would: the job
has the pattern of the lines (`script.progress`).

Only what Python itself writes to standard output and standard error of rank 0 is looked at, in the
process of the script, whose streams stay the objects that they are.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import regex

from kdist_trainer import log
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes.liveness import Phase

_LONGEST_LINE: Final = 2000
"""Characters of a line that are looked at: a pattern may take long for many."""
_MATCH_SECONDS: Final = 1.0
"""Of all processors; a pattern that takes longer for a line would hold up the training."""
_MOST_STEPS: Final = 100_000
"""Steps between two lines; more are another count."""
_HIGHEST_STEP: Final = 1 << 53
"""Steps are sent as floats, and written to the heartbeat as integers of 64 bits."""
_END: Final = re.compile(r"[\r\n]")
_COLOR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_Number = TypeVar("_Number", int, float)


class PrintedProgress(Reporter):
    """Finds the steps in the output of this process. Thread-safe; raises nothing."""

    def __init__(self, pattern: str) -> None:
        super().__init__(min_interval_seconds=0.0)  # no other line may follow
        self._pattern: regex.Pattern[str] | None = regex.compile(pattern)
        self._has_lines = self._has_matched = False
        self._rests: dict[str, str] = {}
        self._last: int | None = None
        self._has_warned = False
        self._lock, self._process = threading.RLock(), os.getpid()

    def install(self) -> None:
        """Look at all that is written from now on."""
        atexit.register(self._report_none)
        for stream in (sys.stdout, sys.stderr):
            stream.write = self._observe(stream.write, stream.name)  # type: ignore[method-assign]

    def _observe(self, write: Callable[[str], int], name: str) -> Callable[[str], int]:
        def observed(text: str) -> int:
            count = write(text)
            self.feed(text, name)
            return count

        return observed

    def feed(self, text: str, stream: str = "") -> None:
        """Take in what was written to a stream, which need not be whole lines."""
        if os.getpid() != self._process:
            return
        if self._pattern is None:
            if self._has_matched:  # no step any more, but a script that prints does not hang
                with suppress(Exception), self._lock:
                    self.begin(Phase.STEP)
            return
        try:
            with self._lock:
                *lines, rest = _END.split(self._rests.get(stream, "") + text)
                self._rests[stream] = rest[:_LONGEST_LINE]
                for line in lines:
                    shown = _COLOR.sub("", line[:_LONGEST_LINE])
                    self._has_lines |= bool(shown)
                    if found := self._pattern.search(shown, timeout=_MATCH_SECONDS):
                        self._has_matched = True
                        self._report(found.groupdict())
        except Exception as error:  # noqa: BLE001 - what a script prints must not end it
            self._pattern = None
            message = f"progress is not read any more: {type(error).__name__}: {error}"
            if isinstance(error, TimeoutError):
                message += f"; spec.script.progress.pattern takes too long for {shown[:80]!r}"
            log.warn("observer-failed", message=message)

    def _report_none(self) -> None:
        """At the end of the script: say that its lines are not those of the pattern."""
        if self._pattern and self._has_lines and not self._has_matched:
            message = (
                "no line matched spec.script.progress.pattern; correct the pattern to see progress"
            )
            if os.getpid() == self._process:
                log.warn("observer-failed", message=message)

    def _report(self, found: dict[str, Any]) -> None:
        step, target = self._read(_read_step, found["step"]), found.get("target")
        loss = self._read(float, found.get("loss"))
        if step == 0 and self._last is None:  # a bar is drawn before its first step
            self._last, self._created_at = 0, time.perf_counter()
        if step is None or (self._last is not None and step <= self._last):
            # drawn again, an evaluation, or a count that begins again with each epoch
            self.begin(Phase.STEP)
            self.update(loss=loss)
            return
        count = 1 if self._last is None else step - self._last
        self._last = step
        count = count if count <= _MOST_STEPS else 1
        target_steps = self._read(_read_step, target)
        self._reach(step, {"loss": loss}, count=count, target_steps=target_steps)

    def _read(self, read: Callable[[str], _Number], text: str | None) -> _Number | None:
        """The number that a line has; None if it has none, or one that cannot be read."""
        if text is None:
            return None
        try:
            return read(text)
        except (ValueError, OverflowError):
            if not self._has_warned:
                message = f"progress has a line with {text[:50]!r}, which is no number for it"
                log.warn("observer-failed", message=message)
            self._has_warned = True
            return None


def _read_step(text: str) -> int:
    """The number of a step. Raises `ValueError`."""
    if abs(step := int(text)) > _HIGHEST_STEP:
        raise ValueError(f"step {step} is too high")
    return step
