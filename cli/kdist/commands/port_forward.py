"""`kdist port-forward`: forward local ports to the pod of a rank, or to a TensorBoard."""

from __future__ import annotations

import re
from typing import Any

import click

from kdist import console, slices
from kdist.commands import options, targets
from kdist.errors import UsageError
from kdist_trainer.formats import METRICS_PORT

_NAMED = {"metrics": METRICS_PORT, "status": METRICS_PORT}
_TENSORBOARD = re.compile(r"(?:(\d{1,5})?:)?tensorboard")
_PORT = re.compile(r"(?:(\d{1,5})?:)?(\d{1,5})")


@click.command()
@click.argument("job", metavar="NAME|FILE", shell_complete=options.complete_job)
@click.argument("ports", nargs=-1, metavar="[metrics|[LOCAL:]tensorboard|[LOCAL:]REMOTE]...")
@options.pod_options
@options.accept_option
@options.output_option("text", "json")
@options.cluster_options
def command(
    job: str,
    ports: tuple[str, ...],
    *,
    rank: int | None,
    pod: str,
    output: str,
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
      kdist port-forward digits tensorboard     then open the address that it prints
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
                job, ports[0], output=output, timeout=timeout, **cluster_options
            )
        else:
            wanted = [read_port(each) for each in ports or ("metrics",)]
            found = targets.find(job, timeout=timeout, **cluster_options)
            for each in found.forward(wanted, rank=rank, pod=pod):
                if output == "json":
                    document = {"pod": each.pod, "localPort": each.local, "port": each.remote}
                    console.emit(document, kind="Forward", output=output, stream=True)
                    continue
                console.result(
                    f"Forwarding from 127.0.0.1:{each.local} -> {each.pod}:{each.remote}"
                )
    except KeyboardInterrupt:
        console.message("TensorBoard ended." if shows_tensorboard else "Forwarding ended.")


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
