"""Fetches the data and weights that a job names by URL to this machine, before its agents start,
each with `python -m kdist_trainer.fetch` as a process. What is fetched stays in a cache folder that
all runs share; the program itself finds what is complete there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from kdist.events import Entry, LogTail, parse
from kdist.job.local.run_dir import RunFolder, open_private
from kdist.job.local.supervisor import KILL_SECONDS, OnEvent, Outcome, SignalQueue
from kdist.spec import Exit, FetchSource, TrainingJob, list_sources
from kdist.status import FETCHER, FetchProgress, documents
from kdist_trainer.formats.json_text import encode_json

CACHE_VARIABLE = "KDIST_CACHE"
PREFIX = FETCHER
"""Beginning of the names of the fetches' folders in a run folder."""
_ACTIVE = ("data-fetch", "data-progress", "data-retry", "data-waiting")
_POLL_SECONDS = 0.25
_TAIL_BYTES = 1 << 14  # of a log in which the last event is looked for


def find_cache() -> Path:
    """The folder that keeps what was fetched: `$KDIST_CACHE`, else `kdist` in the user's caches."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).absolute()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(caches) if caches.startswith("/") else Path.home() / ".cache"
    return root / "kdist"


def folder_of(source: FetchSource) -> Path:
    """The folder of the cache that a source is fetched to, the same for every job; its files are in
    `files`.
    """
    key = encode_json([source.url, source.endpoint, source.region])
    kind = ["weights"] if source.is_weights and source.scheme == "hf" else []
    name = sha256("\0".join([key, *kind]).encode()).hexdigest()[:16]
    return find_cache() / "data" / name


def list_fetches(job: TrainingJob) -> list[FetchSource]:
    """What `kdist run` fetches: no data of which the file names a path on this machine."""
    return [source for source in list_sources(job.spec) if source.path is None]


@dataclass(frozen=True)
class FetchCommand:
    """How to start one fetch: what it is in the run folder, its arguments and its files there."""

    node: str
    source: FetchSource
    argv: Sequence[str]
    log: Path


def plan_fetches(job: TrainingJob, folder: RunFolder) -> list[FetchCommand]:
    """One command for each source that is to be fetched."""
    found = []
    for source in list_fetches(job):
        node = f"{PREFIX}{source.name}"
        argv = [sys.executable, "-m", "kdist_trainer.fetch"]
        argv += [argument for _, argument in source.arguments()]
        argv += ["--folder", str(folder_of(source))]
        argv += ["--termination-message", str(folder.node(node) / "exit.json")]
        argv += ["--parent-pipe", str(folder.parent_pipe)]
        found.append(FetchCommand(node, source, argv, folder.log(node)))
    return found


@dataclass
class Fetches:
    """All fetches of one invocation, one after the other.

    Attributes:
        commands: how to start each.
        environment: of the processes; it has the credentials.
        directory: their working directory.
        handle: receives the entries of their logs.
        draw: shows the present state; is called often.
        log_event: receives what happens to the processes.
    """

    commands: Sequence[FetchCommand]
    environment: Mapping[str, str]
    directory: Path
    handle: Callable[[Entry], None]
    draw: Callable[[], None]
    log_event: OnEvent
    _killed: bool = field(default=False, init=False)

    def run(self, signals: SignalQueue) -> Outcome | None:
        """Fetch all. Returns None if everything is there, else how the invocation ends. Raises
        `OSError` if a process cannot be started.
        """
        for command in self.commands:
            code = self._fetch(command, signals)
            if self._killed:
                return Outcome("killed", code, command.node)
            if signals.stopped_by is not None:
                return Outcome("stopped", int(Exit.STOPPED), command.node)
            if code != 0:
                return Outcome("failed", code, command.node)
        return None

    def _fetch(self, command: FetchCommand, signals: SignalQueue) -> int:
        tail = LogTail(command.node, command.log)
        with open_private(command.log, "ab") as log:
            process = subprocess.Popen(
                command.argv,
                env=dict(self.environment),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C reaches only kdist
            )
        try:
            while process.poll() is None:
                for number, kills in signals.take():
                    if kills:
                        self._killed = True
                        process.kill()
                    else:
                        reason = f"{number.name}; what was fetched is kept"
                        self.log_event("kdist", "stopping", reason=reason)
                        process.terminate()
                self._show(tail.read())
                signals.wait(_POLL_SECONDS)
            self._show(tail.read(last=True))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        return int(process.returncode)

    def _show(self, entries: Iterator[Entry]) -> None:
        for entry in entries:
            self.handle(entry)
        self.draw()


def read_fetch(root: Path, *, since: float) -> tuple[str, FetchProgress | None] | None:
    """The URL that an active run fetches now and how far it is; None if it fetches nothing. Its
    invocation began at `since`, in unix seconds.
    """
    for log in sorted(root.glob(f"{PREFIX}*/log")):
        event = _last_event(log, since)
        if event is not None and event["event"] in _ACTIVE:
            return documents.text(event, "url"), FetchProgress.read(event)
    return None


def _last_event(log: Path, since: float) -> Mapping[str, Any] | None:
    try:
        if log.stat().st_mtime < since:
            return None
        with log.open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = lines.read().decode(errors="replace")
    except OSError:
        return None
    return next(filter(None, map(parse, reversed(tail.split("\n")))), None)
