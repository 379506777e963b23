"""`kdist port-forward`: ports of this machine that end in the pod of a rank."""

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
    from kdist.status import Pod
    from kdist.steer.target import Target

_NAMED = {"metrics": 9401, "status": 9401}
_LOOK_SECONDS = 2.0
_PORT = re.compile(r"(?:(\d{1,5})?:)?(\d{1,5})")


@click.command()
@click.argument("job", metavar="NAME|FILE")
@click.argument("ports", nargs=-1, metavar="[metrics|[LOCAL]:REMOTE]...")
@click.option("--rank", type=click.IntRange(min=0), help="The pod that has this rank; rank 0 if nothing is said.")
@click.option("--pod", default="", metavar="NAME", help="This pod.")
@options.cluster_options
def command(job: str, ports: tuple[str, ...], *, rank: int | None, pod: str, timeout: float | None, **place: Any) -> None:
    r"""Let ports of this machine end in the pod of a rank.

    Without a port it is the agent's: metrics, /status and /healthz. A pod that is replaced is followed. Ctrl-C ends it.

    \b
    Examples:
      kdist port-forward digits                 then: curl localhost:9401/status
      kdist port-forward digits 8080:9401 --rank 3
      kdist port-forward digits :6006           (a free port of this machine)
    """
    wanted = [read_port(each) for each in ports or ("metrics",)]
    target = options.find_target(job, None, timeout=timeout, **place)
    try:
        _serve(target, wanted, rank=rank, pod=pod)
    except KeyboardInterrupt:
        console.message("Forwarding ended.")


def read_port(text: str) -> tuple[int, int]:
    """(local, remote) of `metrics`, `REMOTE`, `LOCAL:REMOTE` or `:REMOTE`, where 0 is a free port. Raises `UsageError`."""
    if text in _NAMED:
        return _NAMED[text], _NAMED[text]
    found = _PORT.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65_536 or int(found[1] or 0) > 65_535:
        raise UsageError(f"`{text}` is no port; write {', '.join(_NAMED)}, REMOTE, LOCAL:REMOTE or :REMOTE")
    remote = int(found[2])
    local = int(found[1]) if found[1] else 0 if ":" in text else remote
    return local, remote


def _serve(target: Target, wanted: list[tuple[int, int]], *, rank: int | None, pod: str) -> None:
    """Forward until Ctrl-C; when the pod goes and another takes its place, to that one, at the same local ports."""
    from kdist.steer import agents

    while True:
        chosen = agents.choose_pod(target, rank=rank, pod=pod)
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


def _runs(target: Target, chosen: Pod) -> bool:
    return any(pod.name == chosen.name and pod.running for pod in target.pods())


def _await_another(target: Target, *, rank: int | None, pod: str) -> None:
    """Wait for a pod to forward to. Raises `KdistError` if the job is over."""
    from kdist.steer import agents

    while True:
        state = target.state()
        if state.finished or state.suspended:
            word = state.finished or "suspended"
            raise KdistError(
                f"{target.name} is {word}: nothing is left to forward to", next_command=f"kdist status {target.name}"
            )
        try:
            agents.choose_pod(target, rank=rank, pod=pod)
        except KdistError:
            time.sleep(_LOOK_SECONDS)
        else:
            return
