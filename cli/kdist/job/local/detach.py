"""`kdist run --detach`: starts a run as a process of its own session and waits until it has begun.

The output of a detached run goes to a file next to the run folders until its run folder is open,
and from then on the same file is `.kdist/NAME/run.log`. The started process reports over a pipe
when all of its agents serve; the pipe closes without a report when the run ends before that.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kdist.errors import KdistError
from kdist.job.local import run_dir
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json

LOG = "run.log"
_VARIABLE = "KDIST_DETACHED"


@dataclass(frozen=True)
class Launched:
    """Result of starting a detached run.

    Attributes:
        begun: whether its agents serve, so that the run goes on by itself.
        code: the exit code of a run that ended before; 0 if it has begun.
        output: what a run that ended before has printed.
        name: name of the job; empty if the run ended before.
        log: file that receives the output.
        pid: process of the run.
    """

    begun: bool
    code: int
    output: str = ""
    name: str = ""
    log: Path | None = None
    pid: int = 0


def launch_detached(argv: Sequence[str], cwd: Path) -> Launched:
    """Start `kdist ARGV` in the background and wait until it has begun or has ended.

    Ctrl-C while it waits stops the run as SIGTERM does.

    Args:
        argv: the arguments after `kdist`, without `--detach`.
        cwd: working directory of the run, from which its relative paths start.

    Raises:
        KdistError: the process cannot be started.
    """
    environment = dict(os.environ)
    home = run_dir.home() if os.environ.get(run_dir.HOME_VARIABLE) else cwd.absolute() / ".kdist"
    if os.environ.get(run_dir.HOME_VARIABLE):
        environment[run_dir.HOME_VARIABLE] = str(home)
    reader, writer = os.pipe()
    log = home / f".run-{secrets.token_hex(4)}.log"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with run_dir.open_private(log, "x+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "kdist", *argv],
                cwd=cwd,
                env={**environment, _VARIABLE: f"{writer}:{log}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[writer],
            )
            os.close(writer)
            writer = -1
            return _await_begin(process, reader, output.fileno())
    except OSError as error:
        place = error.filename or home
        raise KdistError(
            f"the run cannot be started in the background: {place}: {error.strerror}"
        ) from error
    finally:
        for end in (reader, writer):
            if end >= 0:
                os.close(end)
        with suppress(OSError):
            log.unlink()  # unless it is the run's log now


def _await_begin(process: subprocess.Popen[bytes], reader: int, output: int) -> Launched:
    try:
        report = _read_report(reader)
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    if report is not None:
        process.returncode = 0  # it goes on; this process does not wait for it
        return Launched(
            True, 0, name=str(report["job"]), log=Path(str(report["log"])), pid=process.pid
        )
    code = process.wait()
    size = os.fstat(output).st_size
    text = os.pread(output, size, 0).decode(errors="replace")
    return Launched(False, 128 - code if code < 0 else code, output=text)


def _read_report(reader: int) -> Mapping[str, object] | None:
    """The report of the started process; None if the process ended without one."""
    with os.fdopen(os.dup(reader), "rb") as stream:
        try:
            report = parse_json(stream.readline())
        except MalformedTextError:
            return None
    return report if isinstance(report, dict) else None


class LauncherLink:
    """The started process's end of the pipe to the one that has started it."""

    def __init__(self, descriptor: int, log: Path) -> None:
        self._descriptor: int | None = descriptor
        self._log = log
        os.set_inheritable(descriptor, False)

    @classmethod
    def take(cls) -> LauncherLink | None:
        """The link of a detached run, removed from the environment, which the agents inherit;
        None in any other run.
        """
        text = os.environ.pop(_VARIABLE, "")
        number, _, log = text.partition(":")
        return cls(int(number), Path(log)) if number.isdecimal() and log else None

    def move_log(self, root: Path) -> None:
        """Make the output so far, and all that follows, `run.log` of the run folder."""
        with suppress(OSError):
            self._log = self._log.replace(root / LOG)

    def report_begun(self, job: str) -> None:
        """Tell the launcher that the run has begun. Idempotent."""
        if self._descriptor is not None:
            with suppress(OSError):  # the launcher has been interrupted
                report = {"job": job, "log": str(self._log)}
                os.write(self._descriptor, encode_json(report).encode() + b"\n")
            self.close()

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
