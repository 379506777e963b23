"""`kdist diff`: what applying jobs would change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, KdistError

if TYPE_CHECKING:
    from kdist.deploy import Difference

_COLORS = {"+": "green", "-": "red", "@": "cyan"}


@click.command()
@options.files_argument
@options.cluster_options
@options.set_option
@options.backend_option
@click.option(
    "--force-conflicts",
    is_flag=True,
    help="Include the fields that `kdist apply --force-conflicts` would take over.",
)
@click.option(
    "--direct",
    is_flag=True,
    help="Compare the job's objects themselves, as `kdist apply --direct` sends them.",
)
@options.output_option("text", "json")
def command(
    files: tuple[str, ...],
    *,
    more: tuple[str, ...],
    sets: tuple[str, ...],
    backend: str | None,
    force_conflicts: bool,
    direct: bool,
    output: str,
    **cluster_options: Any,
) -> int:
    r"""Show what applying jobs would change.

    The diff is computed by a server-side dry run, so it includes defaults and admission.

    \b
    Examples:
      kdist diff job.yaml
      kdist diff job.yaml --set spec.nodes.max=4
      kdist diff job.yaml --backend jobset
      kdist diff jobs/ | colordiff

    \b
    Exit codes:
      0 no changes   1 changes   2 and above: an error
    """
    from kdist import deploy

    found: list[Difference] = []
    try:
        for job, base in targets.read_jobs([*files, *more], sets, backend=backend):
            cluster = targets.connect(**cluster_options, job=job.metadata.namespace)
            plan = deploy.plan_job(cluster, job, base=base, direct=direct)
            found += deploy.compare(cluster, plan, force=force_conflicts)
    except KdistError as error:
        if error.code == Code.ERROR:  # here 1 means that there are changes
            error.code = Code.USAGE
        raise
    if output == "json":
        changes = [{"object": each.manifest.title, "diff": each.lines()} for each in found]
        console.emit({"changes": changes}, kind="Diff", output=output)
    for each in found if output == "text" else ():
        for line in each.lines():
            console.result(console.style(line, _COLORS.get(line[:1])))
    # 1: there are differences, as kubectl diff says it
    return Code.ERROR if found else Code.OK
