"""The page of the commands: help, arguments and options, from click itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from kdist.app import cli, sections

_INTRODUCTION = """# Commands

Results go to standard output, messages to standard error. Every command ends with one of these \
[exit codes](exit-codes.md). `kdist COMMAND --help` shows the same text as this page.
"""


def render() -> str:
    """Text of the page."""
    root = click.Context(cli, info_name="kdist", **cli.context_settings)
    parts = [_INTRODUCTION]
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
