"""`kdist exec`: a command in the pod of a rank."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import UsageError


@click.command(context_settings={"allow_interspersed_args": True})
@click.argument("job", metavar="NAME|FILE", shell_complete=options.complete_job)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARG]...")
@options.pod_options
@click.option("-c", "--container", metavar="NAME", help="This container instead of the training's.")
@click.option("-i", "--stdin", is_flag=True, help="Pass stdin to the command.")
@click.option("-t", "--tty", is_flag=True, help="Allocate a terminal.")
@options.output_option("text", "json")
@options.cluster_options
def command(
    job: str,
    argv: tuple[str, ...],
    *,
    rank: int | None,
    pod: str,
    container: str | None,
    stdin: bool,
    tty: bool,
    output: str,
    timeout: float | None,
    **cluster_options: Any,
) -> int:
    r"""Run a command in the pod of a rank.

    The exit code is the command's own. With `-o json` what it writes comes as one document when it
    has ended.

    \b
    Examples:
      kdist exec digits -- nproc
      kdist exec digits --rank 3 -- python -c "import torch; print(torch.__version__)"
      kdist exec digits --rank 1 -it -- python
    """
    if not argv:
        raise UsageError(
            "name the command to run after `--`", next_command=f"kdist exec {job} -- nproc"
        )
    found = targets.find(job, timeout=timeout, **cluster_options)
    out, err = bytearray(), bytearray()
    streams = {} if output == "text" else {"out": out.extend, "err": err.extend}
    place: dict[str, Any] = {"rank": rank, "pod": pod, "container": container, **streams}
    code = found.exec(argv, stdin=stdin or tty, tty=tty, **place)
    if output == "text":
        return code
    printed = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
    document = {"job": found.name, "command": list(argv), "exitCode": code, **printed}
    console.emit(document, kind="Execution", output=output)
    return code
