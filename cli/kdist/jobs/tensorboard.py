"""TensorBoard for a job in the cluster: started where its event files are, and ended with whoever
looks.

In the pod of rank 0 where that has memory to spare, since no volume needs to be mounted a second
time then; else, and for a job that is over, in a small pod made for the purpose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kdist.cluster import ExecSession
from kdist.errors import KdistError, NotFoundError
from kdist.jobs import agents, checkpoints
from kdist.jobs.job import ClusterJob
from kdist.jobs.wait import Tell

MODULE = "kdist_trainer.tensorboard"
FOLDER = "tensorboard"
_START_SECONDS = 120.0
_MEMORY = "512Mi"
_SECONDS = 12 * 3600


@dataclass(frozen=True)
class TensorBoardSession:
    """A TensorBoard that runs: on loopback, in this pod, at this port."""

    pod: str
    port: int
    is_open: Callable[[], bool]
    """Whether it still runs; takes a fraction of a second."""


@contextmanager
def show(target: ClusterJob, *, tell: Tell) -> Iterator[TensorBoardSession]:
    """A TensorBoard on the job's event files as long as the block lasts. Raises `KdistError` where
    there can be none.
    """
    checkpoints.check_there_are(target)
    running = next((pod for pod in target.pods() if pod.running and not pod.deleting), None)
    if running is not None:
        pod = agents.choose_pod(target)
        with target.cluster.session(pod.name, _command(target), container=pod.container) as session:
            try:
                port = _read_port(session, pod.name)
            except MemoryShortError as error:
                tell(f"{error}: a small pod beside it shows them")
            else:
                yield TensorBoardSession(pod.name, port, session.is_open)
                return
    else:
        tell(f"no pod of {target.name} runs: a small pod shows its event files")
    idle = ["python", "-m", MODULE, target.checkpoints, "--wait"]
    node = running.node if running is not None else ""
    with checkpoints.looking(target, idle, memory=_MEMORY, seconds=_SECONDS, node=node) as name:
        if checkpoints.wait_for(target, name, ("Running", "Succeeded", "Failed")) != "Running":
            again = f"kubectl describe pod {name} -n {target.namespace}"
            raise KdistError(f"pod {name} ended before it was asked", next_command=again)
        with target.cluster.session(name, _command(target), container="viewer") as session:
            yield TensorBoardSession(name, _read_port(session, name), session.is_open)


class MemoryShortError(KdistError):
    """The pod has no memory for TensorBoard."""


def _command(target: ClusterJob) -> list[str]:
    return ["python", "-m", MODULE, f"{target.checkpoints}/{FOLDER}"]


def _read_port(session: ExecSession, pod: str) -> int:
    """Where it listens, by the first line that it says."""
    line = session.read_line(_START_SECONDS)
    try:
        said: Any = json.loads(line or b"")
    except ValueError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("port"), int):
        return int(said["port"])
    if not isinstance(said, dict) or "problem" not in said:
        raise KdistError(
            f"TensorBoard does not start in pod {pod}",
            hint="the image may be older than this kdist",
        )
    kind = {"memory": MemoryShortError, "empty": NotFoundError}.get(
        str(said.get("cause")), KdistError
    )
    raise kind(f"pod {pod}: {str(said['problem'])[:300]}")
