"""`kdist exec`: a command in the pod of a rank."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import UsageError

_MOST_BYTES = 10 << 20  # of each stream in a document


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
    has ended, at most 10 MiB of each stream; `omittedBytes` counts the rest.

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
    out, err = _Written(), _Written()
    streams = {} if output == "text" else {"out": out.add, "err": err.add}
    place: dict[str, Any] = {"rank": rank, "pod": pod, "container": container, **streams}
    code = found.exec(argv, stdin=stdin or tty, tty=tty, **place)
    if output == "text":
        return code
    printed: dict[str, Any] = {"stdout": out.text(), "stderr": err.text()}
    printed["omittedBytes"] = {"stdout": out.omitted, "stderr": err.omitted}
    for name, lost in printed["omittedBytes"].items():
        if lost:
            console.warning(
                f"the command has written {lost} bytes more to {name} than the "
                f"{_MOST_BYTES >> 20} MiB that -o json holds; without it they are shown"
            )
    document = {"job": found.name, "command": list(argv), "exitCode": code, **printed}
    console.emit(document, kind="Execution", output=output)
    return code


class _Written:
    """The beginning of what a command writes, and the number of bytes after it."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self.omitted = 0

    def add(self, data: bytes) -> None:
        room = _MOST_BYTES - len(self._kept)
        self._kept += data[:room]
        self.omitted += len(data[room:])

    def text(self) -> str:
        return self._kept.decode(errors="replace")
