"""`kdist init`: a job.yaml to start from, and for most templates the code that it runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from kdist import console, slices
from kdist.commands.options import complete_file, output_option
from kdist.errors import Code, UsageError

TEMPLATES = ("digits", "gpt", "workload", "script", "huggingface", "lightning")
_PACKAGES = {"huggingface": "transformers and accelerate", "lightning": "pytorch-lightning"}


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
@click.option(
    "--from",
    "source",
    metavar="FILE",
    shell_complete=complete_file,
    help="Convert a workload: kdist convert --help.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing job file.")
@output_option("text", "json")
def command(path: str, template: str, source: str | None, *, force: bool, output: str) -> int:
    r"""Write a job.yaml to start from.

    \b
    Examples:
      kdist init                       trains digits, and runs as it is
      kdist init llm.yaml -t gpt       trains a small GPT
      kdist init -t workload           with a model of your own, its data and its loss, in src/
      kdist init -t script             with a script for kdist run and torchrun in src/
      kdist init -t huggingface        with a script for Hugging Face's Trainer (or lightning)
      kdist init - -t script           to stdout, the job file alone
      kdist init --from pytorchjob.yaml

    The templates with code also write a test of it, which `pytest src` runs in seconds. Code that
    exists is never overwritten. .kdist/job.schema.json, next to the file, is for editors to
    complete and check it.
    """
    from kdist.spec import scaffold

    text, result = scaffold.write(template), int(Code.OK)
    if source is not None:
        text, result = slices.load("convert", "command").convert(source)
    if path == "-" and output == "json":
        console.emit({"text": text}, kind="JobFile", output=output)
        return result
    if path == "-":
        console.document(text.rstrip("\n"))
        return result
    file = Path(path)
    typed = ["-t", template] if template != TEMPLATES[0] else []
    typed += ["--from", source] if source is not None else []
    again = shlex.join(["kdist", "init", path, *typed, "--force"])
    if source is not None:
        _write(file, text, again if not force else "")
        console.list_files(file, output=output)
        return result
    schema = file.parent / ".kdist" / "job.schema.json"
    code = {file.parent / name: text for name, text in scaffold.read_code(template).items()}
    for each in code:
        if each.exists():
            hint = f"code is never overwritten; `kdist init - -t {template}` prints the job alone"
            raise UsageError(f"`{each}` exists already", hint=hint)
    job = scaffold.write(template, schema=".kdist/job.schema.json")
    _write(file, job, again if not force else "")
    for each, text in code.items():
        _write(each, text, again)
    _write_schema(schema)
    console.list_files(file, *code, output=output)
    if template in _PACKAGES:
        console.message(f"The script needs {_PACKAGES[template]} next to kdist.")
    if code:
        tests = shlex.quote(str(file.parent / scaffold.CODE_FOLDER))
        console.message(f"`pytest {tests}` tests the code in seconds.")
    console.message(f"Next: kdist run {shlex.quote(path)}")
    return Code.OK


def _write(file: Path, text: str, again: str) -> None:
    """Raises `UsageError` if the file cannot be written, or exists already: `again` is the command
    that overwrites it, empty if that is asked for.
    """
    try:
        if file.suffix == ".py":
            file.parent.mkdir(exist_ok=True)
        with file.open("x" if again else "w", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
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
