"""`kdist port-forward`: ports of this machine that end in the pod of a rank, or in a TensorBoard of
the job.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import KdistError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from kdist.jobs.job import ClusterJob
    from kdist.status import Pod

_NAMED = {"metrics": 9401, "status": 9401}
_TENSORBOARD = re.compile(r"(?:(\d{1,5})?:)?tensorboard")
_TENSORBOARD_PORT = 6006
_LOOK_SECONDS = 2.0
_SHORT_SECONDS = 5.0
_PORT = re.compile(r"(?:(\d{1,5})?:)?(\d{1,5})")


@click.command()
@click.argument("job", metavar="NAME|FILE")
@click.argument("ports", nargs=-1, metavar="[metrics|[LOCAL:]tensorboard|[LOCAL:]REMOTE]...")
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="The pod that has this rank; rank 0 if nothing is said.",
)
@click.option("--pod", default="", metavar="NAME", help="This pod.")
@options.cluster_options
def command(
    job: str,
    ports: tuple[str, ...],
    *,
    rank: int | None,
    pod: str,
    timeout: float | None,
    **place: Any,
) -> None:
    r"""Let ports of this machine end in the pod of a rank.

    Without a port it is the agent's: metrics, /status and /healthz. A pod that is replaced is
    followed. `tensorboard` starts TensorBoard on the job's event files, in its pod or in a small
    one beside it, also when the job is over, and for a run of `kdist run` on this machine. Ctrl-C
    ends it, and what was started for it.

    \b
    Examples:
      kdist port-forward digits                 then: curl localhost:9401/status
      kdist port-forward digits 8080:9401 --rank 3
      kdist port-forward digits tensorboard     then: http://localhost:6006
      kdist port-forward digits :tensorboard    (a free port of this machine)
    """
    try:
        if any(_TENSORBOARD.fullmatch(each) for each in ports):
            if len(ports) > 1 or rank is not None or pod:
                raise UsageError("`tensorboard` goes alone: it finds the pod by itself")
            _show_tensorboard(job, read_board(ports[0]), timeout=timeout, **place)
        else:
            wanted = [read_port(each) for each in ports or ("metrics",)]
            _serve(
                options.find_target(job, None, timeout=timeout, **place), wanted, rank=rank, pod=pod
            )
    except KeyboardInterrupt:
        console.message("Forwarding ended.")


def read_board(text: str) -> int:
    """The local port of `tensorboard`, `LOCAL:tensorboard` or `:tensorboard`, where 0 is a free
    one. Raises `UsageError`.
    """
    found = _TENSORBOARD.fullmatch(text)
    if found is None or not 0 <= int(found[1] or 0) < 65_536:
        raise UsageError(
            f"`{text}` names no port; write tensorboard, LOCAL:tensorboard or :tensorboard"
        )
    return int(found[1]) if found[1] else 0 if ":" in text else _TENSORBOARD_PORT


def _show_tensorboard(job: str, local: int, *, timeout: float | None, **place: Any) -> None:
    root = options.find_run(job, None, **place)
    if root is not None:
        _show_here(root, local)
        return
    from kdist.jobs import tensorboard

    target = options.find_target(job, None, timeout=timeout, **place)
    while True:
        with tensorboard.show(target, tell=console.message) as board:
            begun = time.monotonic()
            target.cluster.check_forward(board.pod, board.port)
            with target.cluster.forward(board.pod, board.port, local=local) as port:
                console.result(
                    f"TensorBoard of {target.name} in pod {board.pod}: http://127.0.0.1:{port}/"
                )
                while board.is_open():
                    pass
            local = port
        if time.monotonic() - begun < _SHORT_SECONDS:
            raise KdistError(
                f"TensorBoard ended at once in pod {board.pod}", next_command=target.command("logs")
            )
        console.message(f"TensorBoard in pod {board.pod} has ended; starting it again")


def _show_here(root: Path, local: int) -> None:
    from kdist.local import trainer_tools

    trainer_tools.show(
        root,
        local,
        tell=lambda port: console.result(f"TensorBoard of {root.name}: http://127.0.0.1:{port}/"),
    )


def read_port(text: str) -> tuple[int, int]:
    """(local, remote) of `metrics`, `REMOTE`, `LOCAL:REMOTE` or `:REMOTE`, where 0 is a free port.
    Raises `UsageError`.
    """
    if text in _NAMED:
        return _NAMED[text], _NAMED[text]
    found = _PORT.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65_536 or int(found[1] or 0) > 65_535:
        raise UsageError(
            f"`{text}` is no port; write {', '.join(_NAMED)}, REMOTE, LOCAL:REMOTE or :REMOTE"
        )
    remote = int(found[2])
    local = int(found[1]) if found[1] else 0 if ":" in text else remote
    return local, remote


def _serve(
    target: ClusterJob, wanted: list[tuple[int, int]], *, rank: int | None, pod: str
) -> None:
    """Forward until Ctrl-C; when the pod goes and another takes its place, to that one, at the same
    local ports.
    """
    from kdist.jobs import agents

    while True:
        chosen = agents.choose_pod(target, rank=rank, pod=pod)
        target.cluster.check_forward(chosen.name, wanted[0][1])
        with ExitStack() as stack:
            bound = []
            for local, remote in wanted:
                port = stack.enter_context(target.cluster.forward(chosen.name, remote, local=local))
                console.result(f"Forwarding from 127.0.0.1:{port} -> {chosen.name}:{remote}")
                bound.append((port, remote))
            wanted = bound
            while _runs(target, chosen):
                time.sleep(_LOOK_SECONDS)
        console.message(f"pod {chosen.name} has gone; looking for the one in its place")
        _await_another(target, rank=rank, pod=pod)


def _runs(target: ClusterJob, chosen: Pod) -> bool:
    return any(pod.name == chosen.name and pod.running for pod in target.pods())


def _await_another(target: ClusterJob, *, rank: int | None, pod: str) -> None:
    """Wait for a pod to forward to. Raises `KdistError` if the job is over."""
    from kdist.jobs import agents

    while True:
        state = target.state()
        if state.finished or state.suspended:
            word = state.finished or "suspended"
            raise KdistError(
                f"{target.name} is {word}: nothing is left to forward to",
                next_command=target.command("status"),
            )
        try:
            agents.choose_pod(target, rank=rank, pod=pod)
        except KdistError:
            time.sleep(_LOOK_SECONDS)
        else:
            return
