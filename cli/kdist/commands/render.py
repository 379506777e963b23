"""`kdist render`: the objects that a job becomes, without a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from kdist import console
from kdist.errors import UsageError


@click.command
@click.argument("file", default="job.yaml")
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", help="Format of the objects.")
@click.option("--backend", metavar="KIND", help="Workload kind, instead of the job file's: job, statefulset, jobset, …")
@click.option("--annotate", is_flag=True, help="Say behind each line which field of job.yaml it comes from.")
@click.option("--set", "sets", metavar="PATH=VALUE", multiple=True, help="Change a field of the job, e.g. spec.nodes=4.")
def command(file: str, *, output: str, backend: str | None, annotate: bool, sets: tuple[str, ...]) -> None:
    r"""Show the Kubernetes objects that a job becomes.

    No cluster is asked: `auto` is an Indexed Job and the rendezvous kubernetes. The same file gives the same text each time, so
    it can be kept in git and sent by kubectl. FILE is job.yaml unless another is named; `-` is stdin.

    \b
    Examples:
      kdist render job.yaml --annotate
      kdist render job.yaml --set spec.image=registry.example.com/trainer:1.0 | kubectl apply --server-side -f -
      kdist render --backend jobset -o json
    """
    from kdist.deploy import plan
    from kdist.load import load_file
    from kdist.render import text

    if annotate and output != "yaml":
        raise UsageError("--annotate writes comments, which only YAML has", hint="leave out -o json")
    job = load_file(file, overrides=[*sets, *([f"spec.backend={backend}"] if backend else [])])
    sent = plan(None, job, base=Path.cwd() if file == "-" else Path(file).absolute().parent)
    for each in sent.warnings:
        console.warning(each)
    console.result(text.to_json(sent.manifests) if output == "json" else text.to_yaml(sent.manifests, annotate=annotate))
