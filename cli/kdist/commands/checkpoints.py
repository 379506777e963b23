"""`kdist checkpoints`: what a run has saved, in the cluster or on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import Code, KdistError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@click.argument("words", nargs=-1, metavar="[verify] NAME|FOLDER")
@click.option("-f", "--filename", "file", metavar="FILE", help="Take name and namespace from a job file.")
@click.option("--name", "only", default="", metavar="CHECKPOINT", help="Look at this one only.")
@click.option("--local", is_flag=True, help="The run of `kdist run` on this machine, even where -n or a cluster is set.")
@options.cluster_options
@options.output_option("table", "json", "yaml", "name")
def command(words: tuple[str, ...], *, file: str | None, only: str, local: bool, output: str, **place: Any) -> int:
    r"""List the checkpoints of a run, and verify them.

    A list checks names and sizes against each checkpoint's manifest; `verify` reads every byte and compares the digests. The
    run is the one of `kdist run` where this machine has one by that name and no -n or --context is given. In the cluster a
    running pod looks, or a small one that is made for it and only reads.

    \b
    Examples:
      kdist checkpoints digits
      kdist checkpoints verify digits -n ml
      kdist checkpoints .kdist/digits -o json

    \b
    Exit codes:
      0 listed, all sound   1 one does not verify   4 no such run
    """
    question, job = _read_words(words, file)
    root = options.find_run(job, file, local=local, namespace=place["namespace"], context=place["context"])
    arguments = ["--name", only] if only else []
    document = _look(root, question, arguments) if root else _ask(job, file, question, arguments, place)
    return _show(document, output)


def _read_words(words: tuple[str, ...], file: str | None) -> tuple[str, str | None]:
    """(list or verify, the job that is meant)."""
    question, left = ("verify", words[1:]) if words[:1] == ("verify",) and (len(words) > 1 or file) else ("list", words)
    if len(left) > 1 or bool(left) == bool(file):
        raise UsageError("name one run: NAME, a run folder, or -f FILE", next_command="kdist checkpoints --help")
    return question, left[0] if left else None


def _look(root: Path, question: str, arguments: list[str]) -> dict[str, Any]:
    from kdist.local import looking

    return looking.look(looking.checkpoints_of(root), question, *arguments)


def _ask(job: str | None, file: str | None, question: str, arguments: list[str], place: dict[str, Any]) -> dict[str, Any]:
    from kdist.steer import inspect

    return inspect.ask(options.find_target(job, file, **place), question, *arguments, tell=console.message)


def _show(document: dict[str, Any], output: str) -> int:
    from kdist.steer import listing

    if output == "name":
        for entry in listing.entries(document):
            console.result(str(entry.get("name")))
    elif output != "table":
        console.emit({"apiVersion": "cli.kdist.dev/v1", "kind": "CheckpointList", **document}, output=output)
    elif listing.entries(document):
        console.table(listing.rows(document), header=listing.HEADER)
    else:
        console.message(f"there are no checkpoints in {document.get('folder')}")
    bad = listing.damaged(document)
    if bad:
        console.error(KdistError(f"{len(bad)} of them cannot be used: {', '.join(bad)}", hint="a training passes over them"))
    return Code.ERROR if bad else Code.OK
