"""`kdist render`: the objects that a job becomes, without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Problem, UsageError

if TYPE_CHECKING:
    from kdist.manifest import Manifest


@click.command
@click.argument("file", default="job.yaml", shell_complete=options.complete_file)
@options.output_option("yaml", "json")
@options.backend_option
@click.option(
    "--annotate", is_flag=True, help="Add a comment to each line that names its field of job.yaml."
)
@click.option(
    "--claims",
    type=click.Choice(["without", "with", "only"]),
    default="without",
    help="Leave out the claim of the checkpoints (the default), include it, or show it alone.",
)
@options.set_option
def command(
    file: str,
    *,
    output: str,
    backend: str | None,
    annotate: bool,
    claims: str,
    sets: tuple[str, ...],
) -> None:
    r"""Show the Kubernetes objects of a job, without a cluster.

    No cluster is contacted: `backend: auto` becomes an Indexed Job, and the rendezvous is
    kubernetes. The output is deterministic, so it can be kept in git and applied by kubectl. FILE
    defaults to job.yaml; `-` is stdin.

    The claim for `checkpoints.size` is rendered separately, because `kubectl delete -f` of objects
    that include it deletes the checkpoints. Its annotations keep Argo CD, Flux and Helm from
    deleting it.

    \b
    Examples:
      kdist render job.yaml --annotate
      kdist render job.yaml --set spec.image=IMAGE | kubectl apply --server-side -f -
      kdist render job.yaml --claims only | kubectl apply --server-side -f -
      kdist render --backend jobset -o json
    """
    from kdist.deploy import make_plan
    from kdist.job_file import load_files
    from kdist.render import text

    if annotate and output != "yaml":
        raise UsageError(
            "--annotate cannot be used with -o json", hint="it adds comments, which only YAML has"
        )
    base = Path.cwd() if file == "-" else Path(file).absolute().parent
    looks: list[Problem] = []
    settings = [*sets, *targets.choose_backend(backend)]
    jobs = load_files(file, overrides=settings, warnings=looks)
    for each in looks:
        console.warning(each.advice)
    plans = [make_plan(None, job, base=base) for job in jobs]
    for warning in dict.fromkeys(each for plan in plans for each in plan.warnings):
        console.warning(warning)
    for folder in (plan.folder for plan in plans if plan.folder is not None):
        console.message(folder.describe())
    shown = _choose([each for plan in plans for each in plan.manifests], claims, file)
    if output == "json":
        console.documents([each.document for each in shown], output=output)
    else:
        console.document(text.to_yaml(shown, annotate=annotate))


def _choose(manifests: Sequence[Manifest], claims: str, file: str) -> Sequence[Manifest]:
    """The objects without the claim, with it, or the claim alone; prints a message if it is left
    out.
    """
    found = [each for each in manifests if each.kind == "PersistentVolumeClaim"]
    if claims == "with":
        return manifests
    if claims == "only":
        if not found:
            raise UsageError(
                "the job creates no claim",
                hint="only `checkpoints: {size: …}` creates one; leave out --claims",
            )
        return found
    for each in found:
        console.message(
            f"{each.title} is left out, as `kubectl delete -f` would delete the "
            "checkpoints with it; "
            f"`kdist render {file} --claims only` shows it"
        )
    return [each for each in manifests if each not in found]
