"""`kdist port-forward`: forward local ports to the pod of a rank, or to a TensorBoard."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from kdist import console, slices
from kdist.commands import options, targets
from kdist.errors import UsageError
from kdist_trainer.formats import METRICS_PORT

if TYPE_CHECKING:
    from kdist.job.cluster.job import ClusterJob
    from kdist.job.local.job import LocalJob

_NAMED = {"metrics": METRICS_PORT, "status": METRICS_PORT}
_TENSORBOARD = re.compile(r"(?:(\d{1,5})?:)?tensorboard")
_POLL_SECONDS = 2.0
_PORT = re.compile(r"(?:(\d{1,5})?:)?(\d{1,5})")


@click.command()
@click.argument("job", metavar="NAME|FILE", shell_complete=options.complete_job)
@click.argument("ports", nargs=-1, metavar="[metrics|[LOCAL:]tensorboard|[LOCAL:]REMOTE]...")
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="The pod that runs this rank (default: rank 0).",
)
@click.option("--pod", default="", metavar="NAME", help="This pod.")
@options.accept_option
@options.cluster_options
def command(
    job: str,
    ports: tuple[str, ...],
    *,
    rank: int | None,
    pod: str,
    timeout: float | None,
    **cluster_options: Any,
) -> None:
    r"""Forward local ports to the pod of a rank.

    The default is the agent's port: /metrics, /status and /healthz. If the pod is replaced,
    forwarding continues to its successor. `tensorboard` starts TensorBoard on the job's event
    files, in its pod or in a small helper pod, also when the job has finished, and for a `kdist
    run` on this machine. Ctrl-C stops forwarding, and everything started for it.

    \b
    Examples:
      kdist port-forward digits                 then: curl localhost:9401/status
      kdist port-forward digits 8080:9401 --rank 3
      kdist port-forward digits tensorboard     then: http://localhost:6006
      kdist port-forward digits :tensorboard    (a free local port)
    """
    shows_tensorboard = any(_TENSORBOARD.fullmatch(each) for each in ports)
    try:
        if shows_tensorboard:
            if len(ports) > 1 or rank is not None or pod:
                raise UsageError(
                    "`tensorboard` cannot be combined with other ports, --rank or --pod"
                )
            slices.load("tensorboard", "forward").show(
                job, ports[0], timeout=timeout, **cluster_options
            )
        else:
            wanted = [read_port(each) for each in ports or ("metrics",)]
            _serve(
                targets.find_cluster_job(
                    job, None, instead=_instead, timeout=timeout, **cluster_options
                ),
                wanted,
                rank=rank,
                pod=pod,
            )
    except KeyboardInterrupt:
        console.message("TensorBoard ended." if shows_tensorboard else "Forwarding ended.")


def _instead(run: LocalJob) -> targets.Instead:
    """Where the agents of a run on this machine listen."""
    from kdist.job.local import agents

    ports = agents.ports(run.root) if run.active else {}
    if not ports:
        return targets.Instead("it has no agents that listen now", run.kdist("status"))
    return targets.Instead(
        "its agents listen on this machine", f"curl http://127.0.0.1:{min(ports.items())[1]}/status"
    )


def read_port(text: str) -> tuple[int, int]:
    """(local, remote) of `metrics`, `REMOTE`, `LOCAL:REMOTE` or `:REMOTE`, where 0 means a free
    port. Raises `UsageError`.
    """
    if text in _NAMED:
        return _NAMED[text], _NAMED[text]
    found = _PORT.fullmatch(text)
    if found is None or not 0 < int(found[2]) < 65_536 or int(found[1] or 0) > 65_535:
        raise UsageError(
            f"`{text}` is not a port; write {', '.join(_NAMED)}, REMOTE, LOCAL:REMOTE or :REMOTE"
        )
    remote = int(found[2])
    local = int(found[1]) if found[1] else 0 if ":" in text else remote
    return local, remote


def _serve(
    target: ClusterJob, wanted: list[tuple[int, int]], *, rank: int | None, pod: str
) -> None:
    """Forward until Ctrl-C. When the pod is replaced, forward the same local ports to its
    successor.
    """
    from kdist.job.cluster import agents

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
            while agents.is_running(target, chosen.name):
                time.sleep(_POLL_SECONDS)
        console.message(f"pod {chosen.name} is gone; waiting for its replacement")
        agents.wait_for_pod(target, rank=rank, pod=pod, interval=_POLL_SECONDS)
