"""A run on this machine as the place of a drill (`kdist.drill.drill`)."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from kdist.agents.client import AgentClient
from kdist.drill.faults import Fault, Situation
from kdist.drill.report import Ledger
from kdist.drill.target import FaultPlan, program_source, refuse_second
from kdist.errors import KdistError
from kdist.job.local import agents, run_dir
from kdist.job.local.job import LocalJob
from kdist.job.local.trainer_tools import refresh_records
from kdist.ledger import read_ledger

_LOCK = "drill.lock"
_TIMEOUT = 0.5  # seconds for one response
_END_SECONDS = 5.0  # for the program to end after its standard input


class LocalDrillTarget:
    """A run on this machine."""

    interval = 0.05

    def __init__(self, job: LocalJob) -> None:
        self._job = job

    def look(self, *, without: str = "") -> Situation:
        job = self._job
        inactive = "" if job.active else "no `kdist run` is running"
        ports = {} if inactive else agents.ports(job.root)
        asked = {node: port for node, port in ports.items() if node != without}
        with ThreadPoolExecutor(max(1, len(asked))) as pool:
            clients = [agents.client(each, timeout=_TIMEOUT) for each in asked.values()]
            answers = dict(zip(asked, pool.map(AgentClient.status, clients), strict=True))
        return Situation(
            name=job.name,
            place="local",
            config=run_dir.read_json(job.root / "train.json") or {},
            nodes=tuple(each.name for each in sorted(job.root.glob("node-*"))),
            documents={node: each for node, each in answers.items() if each is not None},
            inactive=inactive,
            check=job.kdist("status"),
        )

    def read_ledger(self) -> Ledger:
        return Ledger(*read_ledger(refresh_records(self._job.root)))

    def find_drill(self) -> str:
        try:
            with (self._job.root / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._read_claim()
        except OSError:
            pass
        return ""

    def find_forbidden(self) -> Mapping[Fault, str]:
        """See `DrillTarget.find_forbidden`. What the user may not do here, the system refuses."""
        return {}

    def require_rights(self, fault: Fault) -> None:
        """See `DrillTarget.require_rights`."""

    @contextmanager
    def claim(self, plan: FaultPlan) -> Iterator[None]:
        if not sys.platform.startswith("linux"):
            raise KdistError(
                "drills of a run on this machine need Linux, whose /proc shows the processes",
                hint="a job on a cluster can be drilled from here",
            )
        lock = os.open(self._job.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise refuse_second(self._job.name, self._read_claim()) from None
            os.truncate(lock, 0)
            os.pwrite(lock, f"{plan.fault} (pid {os.getpid()})".encode(), 0)
            yield
        finally:
            os.close(lock)

    def _read_claim(self) -> str:
        with suppress(OSError):
            return (self._job.root / _LOCK).read_text(errors="replace") or "unknown"
        return "unknown"

    @contextmanager
    def start_program(self, plan: FaultPlan, action: str) -> Iterator[_LocalProgram]:
        options = [*plan.arguments, "--scratch", str(self._job.root / plan.node)]
        with subprocess.Popen(
            [sys.executable, "-c", program_source(), action, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends it by its standard input
        ) as process:
            try:
                yield _LocalProgram(process)
            finally:
                if process.stdin is not None:
                    process.stdin.close()
                try:
                    process.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.terminate()

    def delete_pod(self, node: str) -> bool:  # noqa: ARG002 - the protocol's signature
        return False


class _LocalProgram:
    """The program as a process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None  # noqa: S101 - it was started with a pipe
        self._process = process
        self._output = process.stdout
        self._buffer = bytearray()
        os.set_blocking(self._output.fileno(), False)

    def read_line(self, timeout: float) -> bytes | None:
        end = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = max(0.0, end - time.monotonic())
            ready, _, _ = select.select([self._output], [], [], left)
            data = self._output.read() if ready else None
            if not data:
                return None
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return line

    def is_open(self) -> bool:
        return self._process.poll() is None
