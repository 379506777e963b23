"""`kdist render`: the objects that a job becomes, without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kdist import console
from kdist.commands import options
from kdist.errors import UsageError

if TYPE_CHECKING:
    from kdist.manifest import Manifest


@click.command
@click.argument("file", default="job.yaml")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["yaml", "json"]),
    default="yaml",
    help="Format of the objects.",
)
@options.backend_option
@click.option(
    "--annotate", is_flag=True, help="Say behind each line which field of job.yaml it comes from."
)
@click.option(
    "--claims",
    type=click.Choice(["without", "with", "only"]),
    default="without",
    help="Leave the claim of the checkpoints out (the default), show it too, or nothing else.",
)
@click.option(
    "--set",
    "sets",
    metavar="PATH=VALUE",
    multiple=True,
    help="Change a field of the job, e.g. spec.nodes=4.",
)
def command(
    file: str,
    *,
    output: str,
    backend: str | None,
    annotate: bool,
    claims: str,
    sets: tuple[str, ...],
) -> None:
    r"""Show the Kubernetes objects that a job becomes.

    No cluster is asked: `auto` is an Indexed Job and the rendezvous kubernetes. The same file gives
    the same text each time, so it can be kept in git and sent by kubectl. FILE is job.yaml unless
    another is named; `-` is stdin.

    The claim that `checkpoints.size` asks for is rendered apart: `kubectl delete -f` of objects
    that hold it deletes the checkpoints. Argo CD, Flux and Helm keep it by its annotations.

    \b
    Examples:
      kdist render job.yaml --annotate kdist render job.yaml --set
      spec.image=registry.example.com/trainer:1.0 | kubectl apply --server-side -f - kdist render
      job.yaml --claims only | kubectl apply --server-side -f - kdist render --backend jobset -o
      json
    """
    from kdist.deploy import make_plan
    from kdist.load import load_file
    from kdist.render import text

    if annotate and output != "yaml":
        raise UsageError(
            "--annotate writes comments, which only YAML has", hint="leave out -o json"
        )
    job = load_file(file, overrides=[*sets, *options.choose_backend(backend)])
    sent = make_plan(None, job, base=Path.cwd() if file == "-" else Path(file).absolute().parent)
    for each in sent.warnings:
        console.warning(each)
    shown = _choose(sent.manifests, claims, file)
    console.result(
        text.to_json(shown) if output == "json" else text.to_yaml(shown, annotate=annotate)
    )


def _choose(manifests: Sequence[Manifest], claims: str, file: str) -> Sequence[Manifest]:
    """The objects with or without the claim, or it alone; says so where it is left out."""
    found = [each for each in manifests if each.kind == "PersistentVolumeClaim"]
    if claims == "with":
        return manifests
    if claims == "only":
        if not found:
            raise UsageError(
                "the job makes no claim",
                hint="only `checkpoints: {size: …}` does; leave out --claims",
            )
        return found
    for each in found:
        console.message(
            f"{each.title} is left out, as `kubectl delete -f` would delete the "
            "checkpoints with it; "
            f"`kdist render {file} --claims only` shows it"
        )
    return [each for each in manifests if each not in found]
