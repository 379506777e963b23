"""The only file that prints.

Data goes to stdout and messages go to stderr, so `kdist … -o json | jq` works while a person still
reads what happens. Colour only decorates: it is off when the stream is no terminal, with
`NO_COLOR`, and with `TERM=dumb`; `FORCE_COLOR` turns it on.
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

_outlets: list[NonBlockingWriter] = []  # where messages go while nothing may wait for their reader
_drawn: list[Live] = []  # the view at the foot of the terminal, while there is one


def wants_color() -> bool | None:
    """True or False where the environment decides, None where the stream should (a terminal gets
    colour).
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def result(text: str) -> None:
    """Print a piece of the answer to stdout."""
    click.echo(text, color=wants_color())


def result_bytes(data: bytes) -> None:
    """Print bytes to stdout as they are."""
    click.echo(data, nl=False)


def drop_results() -> None:
    """Lose what stdout did not take, and all that follows, so that the end of this process does not
    fail of it.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def emit(value: Any, *, output: str, name: str = "") -> None:
    """Print an answer in a machine's format: `json`, `yaml`, `name` (the name alone, for pipes), or
    `jsonpath=TEMPLATE`.

    Raises `ValueError` for another format, `UsageError` for a template that cannot be read.
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
    """Print several objects: `yaml` one after the other, `json` as a List; in both forms kubectl
    reads them back.
    """
    if output == "json":
        emit({"apiVersion": "v1", "kind": "List", "items": list(found)}, output="json")
        return
    for index, each in enumerate(found):
        if index:
            result("---")
        emit(each, output=output)


def table(rows: Iterable[Sequence[str]], *, header: Sequence[str]) -> None:
    """Print columns to stdout, kubectl's way: upper-case header, three spaces between, nothing
    drawn.
    """
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(header))]
    for line in lines:
        result(
            "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def message(text: str) -> None:
    """Tell the person what happens; to stderr, and above a view that is drawn there."""
    if _drawn:
        from rich.text import Text

        _drawn[-1].console.print(Text.from_ansi(text))
        return
    click.echo(text, file=_place(), err=True, color=wants_color())


def warning(text: str) -> None:
    """Tell of something that may surprise later."""
    message(f"{click.style('Warning:', fg='yellow')} {text}")


@contextmanager
def unwaiting() -> Iterator[None]:
    """Messages and views in this block never wait for whoever reads stderr; its end does, until
    Ctrl-C.
    """
    sys.stderr.flush()
    try:
        outlet = NonBlockingWriter(sys.stderr.fileno())
    except io.UnsupportedOperation:  # a stream in memory, which nobody has to read
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


def _place() -> IO[str] | None:
    """Where messages go; None is stderr as it is."""
    return cast("IO[str]", _outlets[-1]) if _outlets else None


def catch_up() -> bool:
    """Within `unwaiting`: hand on what still waits for its reader; whether all of it has been
    taken.
    """
    for outlet in _outlets:
        outlet.flush()
    return not any(outlet.is_behind for outlet in _outlets)


def can_draw() -> bool:
    """Whether stderr is a terminal that a live view can be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def drawing() -> Iterator[Live]:
    """A live view at the foot of the terminal, on stderr: `update` draws it anew, `console.print`
    scrolls above it.

    It disappears when the block ends. rich is imported here, when something is drawn, and not
    before.
    """
    from rich.console import Console
    from rich.live import Live

    # Drawn when told, by the caller's own thread: nothing here runs beside it. What others print is
    # no business of the view.
    with Live(
        console=Console(stderr=True, file=_place()),
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
    """Print what went wrong, where, the way out, and last the line that matters most."""
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
