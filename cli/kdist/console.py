"""The only file that prints. Text is data: what a terminal would obey is made visible, and only
`style` styles it (see `kdist.terminal`).

Data goes to stdout and messages go to stderr, so messages stay visible in `kdist … -o json | jq`.
With `-o json`, stdout has one document, also for an error, and it repeats the warnings.
Colour is off when the stream is no terminal, with `NO_COLOR`, and with `TERM=dumb`; `FORCE_COLOR`
turns it on.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, cast

import click

from kdist import terminal
from kdist.errors import InvalidJobError, KdistError
from kdist.terminal import columns
from kdist_trainer.formats import CLI_API_VERSION
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.terminal.drawing import Drawing
    from kdist.terminal.nonblocking import NonBlockingWriter

_outlets: list[NonBlockingWriter] = []  # non-blocking writers for messages, the last one is in use
_drawn: list[Drawing] = []  # the live view, while there is one


class Answer:
    """What an invocation prints for a program.

    Attributes:
        output: the format that `-o` has chosen; until options are read, what it seems to choose.
        given: whether a document was printed.
        warnings: those that no document has repeated yet.
        stream: whether it seems to be one document per line.
        place: the options that choose its cluster and user, for the commands that it suggests.
    """

    def begin(self, output: str, stream: bool = False) -> None:
        """Forget the invocation before this one."""
        self.output, self.given, self.warnings = output, False, list[str]()
        self.stream, self.place = stream, ""

    def __init__(self) -> None:
        self.begin("")


answer = Answer()
_ASKING = re.compile(
    r"\b(?:kdist|kubectl) (?=(?:-n|annotate|apply|bench|checkpoints|config|cordon|create|delete|"
    r"describe|diff|doctor|drill|events|exec|get|logs|port-forward|profile|recover|report|restart|"
    r"resume|scale|status|suspend|top|uncordon|wait|why)\b)"
)
"""The commands that ask a cluster, as texts suggest them."""
_SUGGESTING = frozenset(
    ("nextCommand", "commands", "message", "hint", "fix", "change", "sentence", "warnings")
)


def name_place(value: Any, key: str = "hint") -> Any:
    """A text, or the fields of a document that suggest commands, with the options of the place."""
    if isinstance(value, dict):
        return {name: name_place(each, name) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [name_place(each, key) for each in value]
    if isinstance(value, str) and key in _SUGGESTING and answer.place:
        return _ASKING.sub(lambda found: f"{found[0]}{answer.place} ", value)
    return value


def wants_color() -> bool | None:
    """Whether the environment turns colour on or off; None if the stream decides."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def style(text: str, color: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """The text in a style, for the functions that print a line."""
    return terminal.style(text, color, bold=bold, dim=dim)


def result(text: str) -> None:
    """Print a line to stdout. A line break in it is made visible."""
    _write(text, sys.stdout, keep="\t")


def document(text: str) -> None:
    """Print text of several lines to stdout, such as a manifest or a help text."""
    _write(text, sys.stdout, keep="\n\t")


def _write(text: str, stream: IO[str], *, keep: str) -> None:
    color = wants_color()
    shown = terminal.to_terminal(text, color=stream.isatty() if color is None else color, keep=keep)
    to_stderr = stream is sys.stderr
    # click's colour only says that no style is to be removed again
    click.echo(shown, file=_stream() if to_stderr else None, err=to_stderr, color=True)


def drop_results() -> None:
    """Discard the rest of stdout, so that flushing it at exit does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def emit(value: Any, *, output: str, kind: str = "", name: str = "", stream: bool = False) -> None:
    """Print a value as `json` or `yaml`, or only its name, for pipes, as `name`. A document of
    kdist's own has a `kind`, and is printed with its API version. With `stream`, others follow it,
    and as JSON each is a line.
    """
    if kind:
        value = {"apiVersion": CLI_API_VERSION, "kind": kind, **value}
    is_own = value.get("apiVersion") == CLI_API_VERSION
    if answer.warnings and (is_own or value.get("kind") == "List"):
        found = [*value.get("warnings", ()), *answer.warnings]
        value, answer.warnings = {**value, "warnings": list(dict.fromkeys(found))}, []
    value = name_place(value) if is_own else value
    if output == "json":
        answer.given = True
        text = encode_json(value, indent=None if stream else 2, ensure_ascii=False)
        document(terminal.visible_json(text))
    elif output == "yaml":
        from kdist.yaml_text import to_yaml

        document(to_yaml(value))
    elif output == "name":
        result(name)
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


def list_files(*files: object, output: str) -> None:
    """Say which files were written: in messages, and for programs as a document too."""
    if output == "json":
        emit({"files": [str(each) for each in files]}, kind="Files", output=output)
    message(f"Wrote {', '.join(map(str, files))}.")


def table(rows: Iterable[Sequence[str]], *, header: Sequence[str]) -> None:
    """Print columns to stdout as kubectl does, without borders."""
    add_rows(columns.Table(header), list(rows))


def add_rows(shown: columns.Table, rows: Sequence[Sequence[str]], *, fit: bool = True) -> None:
    """Print the next rows of a table to stdout. On a terminal, what its width cannot show is left
    out, shortened or wrapped (`kdist.terminal.columns`), unless `fit` is false.
    """
    cells = [tuple(map(_cell, row, range(len(row)))) for row in rows]
    for line in shown.add(cells, _width(sys.stdout) if fit else None):
        result(line)


def _cell(text: str, column: int) -> str:
    # a line break would begin a line of its own in the first column
    return terminal.visible(text, keep="\n\t" if column else "\t")


def paragraph(text: str, *, start: str = "") -> None:
    """Print a sentence after `start`, which may be colored, to stdout; a terminal breaks it between
    words, below its own beginning. What follows a line break is indented.
    """
    for line in _wrap(text, start, sys.stdout):
        result(line)


def _wrap(text: str, start: str, stream: IO[str]) -> list[str]:
    """The lines of a text; none but the first begins where a line of its own would."""
    width, margin = _width(stream), len(terminal.unstyle(start))
    text = terminal.visible(name_place(text), keep="\n\t")
    if width is None:
        first, *others = text.split("\n")
    elif len(text) + margin <= width and "\n" not in text:
        return [start + text]
    else:
        first, *others = columns.wrap(text, max(width - margin, min(width, 20)))
        margin = margin if width - margin >= 20 else 0
    return [start + first, *(" " * max(margin, 2) + line for line in others)]


def _width(stream: IO[str]) -> int | None:
    if not stream.isatty():
        return None
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a stream in memory
        return None
    return found or None  # a terminal without a size says 0


def message(text: str) -> None:
    """Print a message to stderr, above a live view; what follows a line break is indented."""
    text = name_place(text).replace("\n", "\n  ")
    if _drawn:
        from rich.text import Text

        shown = terminal.to_terminal(text, color=True, keep="\n\t")
        _drawn[-1].print(Text.from_ansi(shown))
        return
    _write(text, sys.stderr, keep="\n\t")


def warning(text: str) -> None:
    """Print a warning to stderr; the next document for a program repeats it."""
    answer.warnings.append(text)
    _message(text, f"{style('Warning:', 'yellow')} ")


def _message(text: str, start: str) -> None:
    for line in _wrap(text, start, sys.stderr):
        message(line)


@contextmanager
def nonblocking_messages() -> Iterator[None]:
    """Make messages and live views in this block non-blocking. At its end the remaining output is
    written, until Ctrl-C.
    """
    from kdist.terminal.nonblocking import (
        NonBlockingWriter,  # imports socket, which help does not need
    )

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
    return cast("IO[str]", _outlets[-1]) if _outlets else None


def ask(question: str) -> None:
    """Ask on stderr whether to go on. Raises `click.Abort` for a no."""
    click.confirm(terminal.visible(question), abort=True, err=True)


def flush_messages() -> bool:
    """Within the non-blocking block: write buffered output; whether all of it is written."""
    for outlet in _outlets:
        outlet.flush()
    return not any(outlet.is_behind for outlet in _outlets)


def can_draw() -> bool:
    """Whether stderr is a terminal that a live view can be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def drawing() -> Iterator[Drawing]:
    """A live view at the bottom of the terminal, on stderr: `update` redraws it, and `print` prints
    above it. It disappears when the block ends.
    """
    from kdist.terminal.drawing import Drawing

    view = Drawing(_stream)
    _drawn.append(view)
    try:
        yield view
    finally:
        _drawn.remove(view)
        view.close()


def fail(problem: KdistError) -> None:
    """Print an error for a program that has asked for JSON and has no document yet."""
    if answer.output == "json" and not answer.given:
        with suppress(OSError):  # whoever read it is gone
            emit(problem.to_document(), kind="Error", output="json", stream=answer.stream)


def error(problem: KdistError) -> None:
    """Print an error: its problems with locations, the message, the hint and the next command."""
    if isinstance(problem, InvalidJobError):
        for each in problem.problems:
            message(f"{style(each.where, bold=True)}: {each.sentence}")
            if each.excerpt:
                margin = f"{each.line:>6} | "
                message(f"{margin}{each.excerpt}")
                mark = f"{' ' * (each.column - 1)}{style('^' * each.width, 'red')}"
                message(f"{' ' * (len(margin) - 2)}| {mark}")
            if each.hint:
                message(f"       hint: {each.hint}")
    _message(problem.message, f"{style('Error:', 'red', bold=True)} ")
    if problem.hint:
        _message(problem.hint, f"{style('Hint:', bold=True)} ")
    if problem.next_command:
        before = f"{problem.change}, then " if problem.change else ""
        message(f"{style('Next:', bold=True)} {before}{problem.next_command}")
