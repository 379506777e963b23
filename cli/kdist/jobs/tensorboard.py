"""Runs TensorBoard on the event files of a job in the cluster, for as long as a user views it.

It runs in the pod of rank 0 if that has memory to spare, because no volume needs to be mounted a
second time then; otherwise, and for a job that has finished, in a small helper pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kdist.cluster import ExecSession
from kdist.errors import KdistError, NotFoundError
from kdist.jobs import agents, checkpoints
from kdist.jobs.job import ClusterJob
from kdist.jobs.wait import Notify
from kdist_trainer.untrusted_text import MalformedTextError, parse_json

MODULE = "kdist_trainer.tensorboard"
FOLDER = "tensorboard"
_START_TIMEOUT = 120.0
_MEMORY = "512Mi"
_MAX_SECONDS = 12 * 3600


@dataclass(frozen=True)
class TensorBoardSession:
    """A running TensorBoard, which listens on loopback inside a pod.

    Attributes:
        pod: name of the pod.
        port: in the pod.
        is_open: whether it still runs; takes a fraction of a second.
    """

    pod: str
    port: int
    is_open: Callable[[], bool]


@contextmanager
def run_tensorboard(target: ClusterJob, *, notify: Notify) -> Iterator[TensorBoardSession]:
    """Run TensorBoard on the job's event files while the context lasts. Raises `KdistError` if that
    is not possible.
    """
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
        notify(f"no pod of {target.name} runs: starting a helper pod")
    idle = ["python", "-m", MODULE, target.checkpoints, "--wait"]
    node = running.node if running is not None else ""
    settings: dict[str, Any] = {"seconds": _MAX_SECONDS, "memory": _MEMORY, "node": node}
    with (
        checkpoints.idle_pod(target, idle, **settings) as name,
        target.cluster.session(name, _command(target), container=checkpoints.CONTAINER) as session,
    ):
        yield TensorBoardSession(name, _read_port(session, name), session.is_open)


class MemoryShortError(KdistError):
    """The pod has no memory for TensorBoard."""


def _command(target: ClusterJob) -> list[str]:
    return ["python", "-m", MODULE, f"{target.checkpoints}/{FOLDER}"]


def _read_port(session: ExecSession, pod: str) -> int:
    """The port on which TensorBoard listens, from its first line of output."""
    line = session.read_line(_START_TIMEOUT)
    try:
        report: Any = parse_json(line or b"")
    except MalformedTextError:
        report = None
    if isinstance(report, dict) and isinstance(report.get("port"), int):
        return int(report["port"])
    if not isinstance(report, dict) or "problem" not in report:
        raise KdistError(
            f"TensorBoard does not start in pod {pod}",
            hint="the image may be older than this kdist",
        )
    kind = {"memory": MemoryShortError, "empty": NotFoundError}.get(
        str(report.get("cause")), KdistError
    )
    raise kind(f"pod {pod}: {str(report['problem'])[:300]}")
