"""`kdist checkpoints`: what a run has saved, in the cluster or on this machine, and its weights as
a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, KdistError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_REJECTED = {  # why checkpoints cannot be resumed from: in words, and what to do
    "damaged": ("damaged", "training skips damaged checkpoints"),
    "unreadable": (
        "cannot be read",
        "every byte is as it was written, but no training can read them: resume from another one, "
        "or read them with the version of kdist-trainer that wrote them",
    ),
    "unsupported": (
        "of a newer version",
        "train with the version of kdist-trainer that wrote them",
    ),
}


def _complete_words(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem[Any]]:
    from click.shell_completion import CompletionItem

    given = context.params.get("words") or ()
    actions = [] if given else ["verify", "export"]
    found = options.complete_job(context, parameter, word)
    return [*found, *(CompletionItem(each) for each in actions if each.startswith(word))]


@click.command()
@click.argument(
    "words", nargs=-1, metavar="[verify|export] NAME|FOLDER", shell_complete=_complete_words
)
@options.filename_option()
@click.option("--name", "only", default="", metavar="CHECKPOINT", help="This checkpoint only.")
@options.local_option
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="export: the checkpoint of this step instead of the newest.",
)
@click.option(
    "--ema", is_flag=True, help="export: the moving average of the weights (train.emaDecay)."
)
@options.accept_option
@options.cluster_options
@options.out_option("export: the file to write.")
@options.output_option("table", "json", "yaml", "name")
def command(
    words: tuple[str, ...],
    *,
    file: str | None,
    only: str,
    local: bool,
    step: int | None,
    ema: bool,
    out: Path | None,
    output: str,
    **cluster_options: Any,
) -> int:
    r"""List a run's checkpoints, verify them, or export weights.

    The list checks names and sizes against each checkpoint's manifest; `verify` reads every byte,
    compares the digests, and reads what it holds as a training would, which may refuse what would
    run code; `export` verifies too, and writes the model's weights by their full
    names as safetensors. NAME is a `kdist run` on this machine if there is one and neither -n nor
    --context is given. On a cluster the command runs in a pod of the job, or in a small helper pod
    that only reads.

    \b
    Examples:
      kdist checkpoints digits
      kdist checkpoints verify digits -n ml
      kdist checkpoints .kdist/digits -o json
      kdist checkpoints export digits --out digits.safetensors
      kdist checkpoints export digits --step 1200 --ema --out average.safetensors -n ml

    \b
    Exit codes:
      0 listed and all valid, or exported   1 a checkpoint is damaged, unreadable or newer
      4 no such run
    """
    action, job = _read_words(words, file)
    if action == "export":
        if only:
            raise UsageError("--name cannot be combined with export", hint="--step chooses one")
        if out is None:
            raise UsageError(
                "name the file to write: --out model.safetensors",
                next_command="kdist checkpoints --help",
            )
        found = targets.find(job, file, local=local, **cluster_options)
        steps = ["--step", str(step)] if step is not None else []
        _show_export(found.export_weights(out, *steps, *(["--ema"] if ema else [])), output)
        return Code.OK
    if out is not None or step is not None or ema:
        raise UsageError("--out, --step and --ema are options of `kdist checkpoints export`")
    found = targets.find(job, file, local=local, **cluster_options)
    arguments = ["--name", only] if only else []
    return _show(found.checkpoints(action, *arguments), output)


def _read_words(words: tuple[str, ...], file: str | None) -> tuple[str, str | None]:
    """(list, verify or export, the job that is meant)."""
    named = words[:1] in (("verify",), ("export",)) and (len(words) > 1 or bool(file))
    action, left = (words[0], words[1:]) if named else ("list", words)
    if len(left) > 1 or bool(left) == bool(file):
        raise UsageError(
            "name one run: NAME, a run folder, or -f FILE", next_command="kdist checkpoints --help"
        )
    return action, left[0] if left else None


def _show_export(document: dict[str, Any], output: str) -> None:
    from kdist.units import size

    if output != "table":
        console.emit(document, kind="Export", output=output, name=str(document["file"]))
        return
    average = f", {document['averaged']} of them averages" if document["averaged"] else ""
    summary = (
        f"{document['tensors']} tensors{average}, {size(document['bytes'])}, of "
        f"{document['checkpoint']}"
    )
    console.result(f"{document['file']}: {summary}")


def _show(document: dict[str, Any], output: str) -> int:
    from kdist.views import checkpoints

    errors = [
        KdistError(f"{len(names)} {what}: {', '.join(names)}", hint=hint)
        for reason, (what, hint) in _REJECTED.items()
        if (names := checkpoints.rejected(document, reason))
    ]
    if output == "name":
        for entry in checkpoints.entries(document):
            console.result(str(entry.get("name")))
    elif output != "table":
        shown = {**document, "errors": [each.to_document() for each in errors]}
        console.emit(shown, kind="CheckpointList", output=output)
    elif checkpoints.entries(document):
        console.table(checkpoints.checkpoint_rows(document), header=checkpoints.HEADER)
    else:
        console.message(f"there are no checkpoints in {document.get('folder')}")
    for each in errors:
        console.error(each)
    return Code.ERROR if errors else Code.OK
