"""`kdist init`: a job.yaml to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from kdist import console
from kdist.errors import UsageError

TEMPLATES = ("digits", "gpt", "script")


@click.command
@click.argument("path", default="job.yaml", metavar="[PATH]")
@click.option(
    "-t",
    "--template",
    type=click.Choice(TEMPLATES),
    default="digits",
    show_default=True,
    help="What to train.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def command(path: str, template: str, force: bool) -> None:
    r"""Write a job.yaml to start from.

    \b
    Examples:
      kdist init                       trains digits, and runs as it is
      kdist init llm.yaml -t gpt       trains a small GPT
      kdist init - -t script           to stdout, for a torchrun script

    Also writes .kdist/job.schema.json next to the file, so that editors can complete and check it.
    """
    from kdist.spec import scaffold

    if path == "-":
        console.document(scaffold.write(template).rstrip("\n"))
        return
    file = Path(path)
    schema = file.parent / ".kdist" / "job.schema.json"
    _write(file, scaffold.write(template, schema=".kdist/job.schema.json"), force=force)
    _write_schema(schema)
    console.message(f"Wrote {file}.")
    if template == "script":
        console.message("It runs `train.py` next to it; name your own script in spec.script.path.")
    console.message(f"Next: kdist run {shlex.quote(path)}")


def _write(file: Path, text: str, *, force: bool) -> None:
    """Raises `UsageError` if the file exists already, or cannot be written."""
    try:
        with file.open("w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        again = f"kdist init {shlex.quote(str(file))} --force"
        raise UsageError(
            f"`{file}` exists already",
            hint="name another file, or overwrite it",
            next_command=again,
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write `{file}`: {error.strerror}") from None


def _write_schema(file: Path) -> None:
    """Write the schema for editors; only warn if it cannot be written."""
    from kdist.spec import reference

    try:
        file.parent.mkdir(exist_ok=True)
        file.write_text(reference.schema_text(), encoding="utf-8")
    except OSError as error:
        console.warning(f"cannot write `{file}` for editors: {error.strerror}")
