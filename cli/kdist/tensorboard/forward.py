"""Shows the event files of a job in TensorBoard, for as long as a user views it, on a local port.

For a job in the cluster it runs in the pod of rank 0 if that has memory to spare, because no volume
needs to be mounted a second time then; otherwise, and for a job that has finished, in a small
helper pod. For a run on this machine it is a subprocess.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist import console
from kdist.cluster import ExecSession
from kdist.commands import targets
from kdist.deploy.helper_pod import CONTAINER
from kdist.errors import KdistError, NotFoundError, UsageError
from kdist.job.cluster import agents, checkpoints
from kdist.job.cluster.applied import AppliedJob
from kdist.job.job import Notify
from kdist.job.local.job import LocalJob
from kdist.job.local.run_dir import location_of
from kdist.status import documents

MODULE = "kdist_trainer.tensorboard"
FOLDER = "tensorboard"
_START_TIMEOUT = 120.0
_MEMORY = "512Mi"
_MAX_SECONDS = 12 * 3600
_PORT = re.compile(r"(?:(\d{1,5})?:)?tensorboard")
_DEFAULT_PORT = 6006
_MIN_LIFETIME_SECONDS = 5.0  # a TensorBoard that ends sooner is not started again


def read_port(text: str) -> int:
    """The local port of `tensorboard`, `LOCAL:tensorboard` or `:tensorboard`, where 0 means a
    free one. Raises `UsageError`.
    """
    found = _PORT.fullmatch(text)
    if found is None or not 0 <= int(found[1] or 0) < 65_536:
        raise UsageError(
            f"`{text}` is not a port; write tensorboard, LOCAL:tensorboard or :tensorboard"
        )
    return int(found[1]) if found[1] else 0 if ":" in text else _DEFAULT_PORT


def show(
    job: str, port: str, *, output: str, timeout: float | None, **cluster_options: Any
) -> None:
    """Run TensorBoard, and forward a local port to it until Ctrl-C. Raises `KdistError`."""
    local = read_port(port)
    found = targets.find(job, timeout=timeout, **cluster_options)
    if isinstance(found, LocalJob):
        run_locally(
            found.root,
            local,
            on_ready=lambda port: _tell(found.root.name, "", port, output),
        )
        return
    target = found.applied
    while True:
        with run_tensorboard(target, notify=console.message) as session:
            began = time.monotonic()
            target.cluster.check_forward(session.pod, session.port)
            with target.cluster.forward(session.pod, session.port, local=local) as bound:
                _tell(target.name, session.pod, bound, output)
                while session.is_open():
                    pass
            local = bound
        if time.monotonic() - began < _MIN_LIFETIME_SECONDS:
            raise KdistError(
                f"TensorBoard ended at once in pod {session.pod}",
                next_command=target.command("logs"),
            )
        console.message(f"TensorBoard in pod {session.pod} has ended; starting it again")


def _tell(name: str, pod: str, port: int, output: str) -> None:
    url = f"http://127.0.0.1:{port}/"
    if output == "json":
        document = {"job": name, "pod": pod, "url": url}
        console.emit(document, kind="TensorBoard", output=output, stream=True)
    else:
        console.result(f"TensorBoard of {name}{f' in pod {pod}' if pod else ''}: {url}")


@dataclass(frozen=True)
class TensorBoardSession:
    """A running TensorBoard, which listens on loopback inside a pod. `is_open` takes a fraction of
    a second.
    """

    pod: str
    port: int
    is_open: Callable[[], bool]


@contextmanager
def run_tensorboard(target: AppliedJob, *, notify: Notify) -> Iterator[TensorBoardSession]:
    """Run TensorBoard on the job's event files while the context lasts. Raises `KdistError`."""
    checkpoints.check_has_checkpoints(target)
    running = next((pod for pod in target.pods() if pod.running and not pod.deleting), None)
    if running is not None:
        pod = agents.choose_pod(target)
        with target.cluster.session(pod.name, _command(target), container=pod.container) as session:
            try:
                port = _read_port(session, pod.name)
            except MemoryShortError as error:
                notify(f"{error}: starting a helper pod on its node")
            else:
                yield TensorBoardSession(pod.name, port, session.is_open)
                return
    else:
        notify(checkpoints.NO_POD.format(target.name))
    idle = ["python", "-m", MODULE, target.checkpoints, "--wait"]
    node = running.node if running is not None else ""
    settings: dict[str, Any] = {"seconds": _MAX_SECONDS, "memory": _MEMORY, "node": node}
    with (
        checkpoints.idle_pod(target, idle, **settings) as name,
        target.cluster.session(name, _command(target), container=CONTAINER) as session,
    ):
        yield TensorBoardSession(name, _read_port(session, name), session.is_open)


class MemoryShortError(KdistError):
    """The pod has no memory for TensorBoard."""


def _command(target: AppliedJob) -> list[str]:
    return ["python", "-m", MODULE, f"{target.checkpoints}/{FOLDER}"]


def _read_port(session: ExecSession, pod: str) -> int:
    report = documents.parse(session.read_line(_START_TIMEOUT))
    if isinstance(report.get("port"), int):
        return int(report["port"])
    if "problem" not in report:
        raise KdistError(
            f"TensorBoard does not start in pod {pod}",
            hint="the image may be older than this kdist",
        )
    kind = {"memory": MemoryShortError, "empty": NotFoundError}.get(
        str(report.get("cause")), KdistError
    )
    raise kind(f"pod {pod}: {str(report['problem'])[:300]}")


def run_locally(root: Path, port: int, *, on_ready: Callable[[int], object]) -> None:
    """Run TensorBoard on the event files of a run until it ends, on a port of loopback; 0 is a free
    one. `on_ready` receives the port. Raises `KdistError` if there are no event files, or
    TensorBoard is not installed.
    """
    location = location_of(root)
    events = f"{location.text}/{FOLDER}"
    command = [sys.executable, "-m", MODULE, events, "--port", str(port)]
    # Its standard input is a pipe that closes when this process ends, for whatever reason.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **location.variables},
    ) as process:
        try:
            report = documents.parse(process.stdout.readline() if process.stdout else None)
            if not isinstance(report.get("port"), int):
                own = f"tensorboard --logdir {shlex.quote(events)}"
                problem = str(report.get("problem", "TensorBoard does not start"))
                raise KdistError(problem, next_command="" if location.is_bucket else own)
            on_ready(report["port"])
            process.wait()
        finally:
            process.terminate()
