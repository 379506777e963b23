"""The only file that prints.

Data goes to stdout and messages go to stderr, so messages stay visible in `kdist … -o json | jq`.
Colour is off when the stream is no terminal, with `NO_COLOR`, and with `TERM=dumb`; `FORCE_COLOR`
turns it on.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

import click

from kdist.errors import InvalidJobError, KdistError, Problem
from kdist.nonblocking import NonBlockingWriter

if TYPE_CHECKING:
    from rich.live import Live

_outlets: list[NonBlockingWriter] = []  # non-blocking writers for messages, the last one is in use
_drawn: list[Live] = []  # the live view, while there is one


def wants_color() -> bool | None:
    """Whether the environment turns colour on or off; None if it depends on whether the stream is
    a terminal.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def result(text: str) -> None:
    """Print output to stdout."""
    click.echo(text, color=wants_color())


def drop_results() -> None:
    """Discard the rest of stdout, so that flushing it at exit does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def emit(value: Any, *, output: str, name: str = "") -> None:
    """Print a value in a machine-readable format.

    Args:
        value: plain values, as for JSON.
        output: `json`, `yaml`, `name` (only the name, for pipes) or `jsonpath=TEMPLATE`.
        name: what `name` prints.

    Raises:
        ValueError: the format is unknown.
        UsageError: the JSONPath template cannot be read.
    """
    if output == "json":
        import json

        result(json.dumps(value, indent=2, ensure_ascii=False))
    elif output == "yaml":
        import yaml

        result(yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip("\n"))
    elif output == "name":
        result(name)
    elif output.startswith("jsonpath="):
        from kdist import jsonpath

        result(jsonpath.find(output.removeprefix("jsonpath="), value))
    else:
        raise ValueError(f"no output format {output!r}")


def documents(found: Sequence[Any], *, output: str) -> None:
    """Print several objects so that kubectl can read them: as YAML documents, or as a JSON List."""
    if output == "json":
        emit({"apiVersion": "v1", "kind": "List", "items": list(found)}, output="json")
        return
    for index, each in enumerate(found):
        if index:
            result("---")
        emit(each, output=output)


def table(rows: Iterable[Sequence[str]], *, header: Sequence[str]) -> None:
    """Print columns to stdout as kubectl does: a header, three spaces between columns, no
    borders.
    """
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(header))]
    for line in lines:
        result(
            "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def message(text: str) -> None:
    """Print a message to stderr, above the live view if there is one."""
    if _drawn:
        from rich.text import Text

        _drawn[-1].console.print(Text.from_ansi(text))
        return
    click.echo(text, file=_stream(), err=True, color=wants_color())


def warning(text: str) -> None:
    """Print a warning to stderr."""
    message(f"{click.style('Warning:', fg='yellow')} {text}")


@contextmanager
def nonblocking_messages() -> Iterator[None]:
    """Make messages and live views in this block non-blocking. At its end the remaining output is
    written, until Ctrl-C.
    """
    sys.stderr.flush()
    try:
        outlet = NonBlockingWriter(sys.stderr.fileno())
    except io.UnsupportedOperation:  # a stream in memory never blocks
        yield
        return
    _outlets.append(outlet)
    try:
        yield
    finally:
        _outlets.remove(outlet)
        try:
            outlet.drain()
        finally:
            outlet.close()


def _stream() -> IO[str] | None:
    """Stream for messages; None for stderr."""
    return cast("IO[str]", _outlets[-1]) if _outlets else None


def flush_messages() -> bool:
    """Within the non-blocking block: write buffered output; whether all of it is written."""
    for outlet in _outlets:
        outlet.flush()
    return not any(outlet.is_behind for outlet in _outlets)


def can_draw() -> bool:
    """Whether stderr is a terminal that a live view can be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def drawing() -> Iterator[Live]:
    """A live view at the bottom of the terminal, on stderr: `update` redraws it, and
    `console.print` prints above it. It disappears when the block ends.
    """
    from rich.console import Console
    from rich.live import Live

    # Drawn only on `update`, in the caller's thread, and without redirecting other output.
    with Live(
        console=Console(stderr=True, file=_stream()),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as live:
        _drawn.append(live)
        try:
            yield live
        finally:
            _drawn.remove(live)


def error(problem: KdistError) -> None:
    """Print an error: its problems with locations, the message, the hint and the next command."""
    if isinstance(problem, InvalidJobError):
        for each in problem.problems:
            _problem(each)
    message(f"{click.style('Error:', fg='red', bold=True)} {problem.message}")
    if problem.hint:
        message(f"{click.style('Hint:', bold=True)} {problem.hint}")
    if problem.next_command:
        message(f"{click.style('Next:', bold=True)} {problem.next_command}")


def _problem(problem: Problem) -> None:
    message(f"{click.style(problem.where, bold=True)}: {problem.sentence}")
    if problem.excerpt:
        margin = f"{problem.line:>6} | "
        message(f"{margin}{problem.excerpt}")
        message(
            " " * (len(margin) - 2)
            + f"| {' ' * (problem.column - 1)}{click.style('^' * problem.width, fg='red')}"
        )
    if problem.hint:
        message(f"       hint: {problem.hint}")
