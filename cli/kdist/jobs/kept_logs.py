"""The logs of a job in the cluster that its agents keep next to the checkpoints, where they outlive
the pods. They are read as checkpoints are: by the trainer's tool, in a running pod of the job or in
a helper pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from kdist.errors import KdistError, NotFoundError
from kdist.jobs import checkpoints
from kdist.jobs.helper_pod import reading_pod
from kdist.jobs.job import ClusterJob
from kdist.jobs.wait import Notify
from kdist.status.documents import Document, integer, items, texts

_MORE_BYTES: Final = 1 << 20
_NODE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")


def are_kept(target: ClusterJob) -> bool:
    """Whether the job's agents keep their logs, and there are checkpoints to keep them with."""
    spec = target.job.spec
    return checkpoints.has_checkpoints(target) and spec.logs.max_bytes > 0


def fetch(
    target: ClusterJob, folder: Path, *, generation: int | None, notify: Notify
) -> dict[str, Path]:
    """Copy what is kept of each node's log to a file in `folder`.

    Args:
        target: the job.
        folder: an existing folder.
        generation: only this one; None for the last one of which there is something.
        notify: receives a message if a helper pod is needed.

    Returns:
        The file of each node.

    Raises:
        NotFoundError: nothing is kept, or nothing of this generation.
        KdistError: the job has no checkpoints in the cluster, or they cannot be read.
    """
    checkpoints.check_has_checkpoints(target)
    with reading_pod(target, notify) as (pod, container):
        tool = ["python", "-m", checkpoints.MODULE, "logs", target.checkpoints]
        code, output = target.cluster.run(pod, tool, container=container)
        answer = checkpoints.read_answer(output.decode(errors="replace"), code, pod)
        wanted, nodes = choose(target.name, answer, generation)
        found = {}
        for node in nodes:
            command = [*tool, "--name", node, "--generation", str(wanted)]
            found[node] = folder / node
            most = 2 * target.job.spec.logs.max_bytes + _MORE_BYTES  # it may be written just now
            with found[node].open("wb") as file:
                write = partial(_write, file, most=most)
                code = target.cluster.exec(
                    pod, command, container=container, out=write, err=lambda _: None
                )
            if code != 0:
                raise KdistError(f"the kept log of {node} cannot be read: exit code {code}")
        return found


def _write(file: BinaryIO, data: bytes, *, most: int) -> None:
    if file.tell() + len(data) > most:
        raise KdistError(f"the kept log of {Path(file.name).name} is larger than {most} bytes")
    file.write(data)


def choose(job: str, document: Document, generation: int | None) -> tuple[int, list[str]]:
    """The generation to show, and the nodes that have a log of it.

    Raises:
        NotFoundError: there is none.
        KdistError: what answered names no nodes; their names become files here.
    """
    kept: Mapping[int, list[str]] = {
        integer(one, "generation") or 0: texts(one, "nodes")
        for one in items(document, "generations")
    }
    if not kept:
        raise NotFoundError(f"no log of {job} is kept", next_command="kdist explain spec.logs")
    wanted = max(kept) if generation is None else generation
    if wanted not in kept:
        raise NotFoundError(
            f"no log of generation {wanted} of {job} is kept; there are those of "
            f"{', '.join(map(str, sorted(kept)))}"
        )
    nodes = kept[wanted]
    if not all(_NODE.fullmatch(node) for node in nodes):
        raise KdistError(f"what keeps the logs of {job} names nodes that cannot be any")
    return wanted, nodes
