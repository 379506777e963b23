"""The page of the commands: help, arguments and options, from click itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from kdist.app import cli, sections
from tools.reference import json_output

_INTRODUCTION = """# Commands

Results go to standard output, messages to standard error. Every command ends with one of these \
[exit codes](exit-codes.md). `kdist COMMAND --help` shows the same text as this page.

## For programs

Every command takes `-o json`. Standard output then is one JSON document with `apiVersion` and \
`kind`, whatever happens: a command that fails prints an `Error`, which has the message, the \
`hint` that says how to mend it, the command to run next, and for job files every problem with \
its line and column. A list without items is `[]`, what is not known is `null`, and a number \
that JSON does not have is the text `"nan"`, `"inf"` or `"-inf"`. Decide by the exit code, then \
by the fields; sentences are for people and may change. `warnings` has those that standard error \
shows, so no program needs to read that. Commands that a document suggests \
keep the options that chose the cluster and the user.

- With `-w`, and `logs -f`, `port-forward`: one document per line, as things change. An `Error` \
follows only if nothing was printed before it, as a line of its own; the exit code says the rest. \
A command that waits and gets SIGTERM or SIGHUP ends likewise, with exit code 143 or 129.
- Nothing asks a question unless standard input is a terminal; `--yes` answers beforehand.
- `--timeout` bounds every wait, and `--dry-run=client` shows a change that is not made.
- A job that failed is no error of `kdist status` and `kdist why`, which say so; it is one of \
`kdist run`, `kdist wait` and `kdist apply --wait`, with exit code 10.
- A typical loop: `kdist validate`, `kdist apply`, `kdist wait --for=first-step --timeout 10m`, \
`kdist wait`; after any failure `kdist why`, whose `fix` and `commands` say what to do.

[output.schema.json](output.schema.json) is the JSON Schema of all kinds. `kdist explain -o \
jsonschema` prints that of the job file.
"""


def render() -> str:
    """Text of the page."""
    root = click.Context(cli, info_name="kdist", **cli.context_settings)
    parts = [_INTRODUCTION, json_output.table() + "\n"]
    for section, names in sections().items():
        parts.append(f"## {section}\n")
        for name in names:
            command = cli.get_command(root, name)
            assert command is not None  # noqa: S101  for the type checker: the table names it
            parts += _describe(command, click.Context(command, info_name=name, parent=root), 3)
    return "\n".join(parts)


def _describe(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    yield f"{'#' * level} {context.command_path}\n"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```\n"
    for kept, paragraph in _paragraphs(command.help or ""):
        yield f"```text\n{paragraph}\n```\n" if kept else f"{_escape(paragraph)}\n"
    records = [
        record
        for param in command.get_params(context)
        if isinstance(param, click.Option) and (record := param.get_help_record(context))
    ]
    yield "| option | meaning |\n|---|---|"
    yield "".join(f"| `{_cell(names)}` | {_escape(_cell(text))} |\n" for names, text in records)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None  # noqa: S101  for the type checker: the group lists it
            yield from _describe(
                inner, click.Context(inner, info_name=name, parent=context), level + 1
            )


def _paragraphs(text: str) -> Iterator[tuple[bool, str]]:
    """The paragraphs of a help, and whether each keeps its lines."""
    for paragraph in inspect.cleandoc(text).replace("\\b\n", "\b\n").split("\n\n"):
        kept = paragraph.lstrip().startswith("\b")
        lines = paragraph.replace("\b\n", "").rstrip()
        if lines.strip():
            yield kept, lines if kept else " ".join(lines.split())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _escape(text: str) -> str:
    """Keep Markdown from reading what help texts say literally."""
    pieces = text.split("`")
    for number in range(0, len(pieces), 2):
        for sign in "*_<>[]$":
            pieces[number] = pieces[number].replace(sign, f"\\{sign}")
    return "`".join(pieces)
