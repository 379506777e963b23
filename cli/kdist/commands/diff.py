"""`kdist diff`: what sending jobs would change."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import Code, KdistError

if TYPE_CHECKING:
    from kdist.deploy import Difference

DIFFERENT = 1
TROUBLE = 2

_COLORS = {"+": "green", "-": "red", "@": "cyan"}


@click.command()
@options.files_argument
@options.cluster_options
@click.option(
    "--set",
    "sets",
    metavar="PATH=VALUE",
    multiple=True,
    help="Change a field of the job, e.g. spec.nodes.max=4.",
)
@options.backend_option
@click.option(
    "--force-conflicts", is_flag=True, help="Show what --force-conflicts would take over."
)
def command(
    files: tuple[str, ...],
    *,
    more: tuple[str, ...],
    sets: tuple[str, ...],
    backend: str | None,
    force_conflicts: bool,
    **where: Any,
) -> int:
    r"""Show what sending jobs would change.

    The server itself is asked, by an apply that it does not keep, so defaults and admission are
    part of the answer. $KUBECTL_EXTERNAL_DIFF is the program that shows it, as for kubectl; it is
    given two folders.

    \b
    Examples:
      kdist diff job.yaml
      kdist diff job.yaml --set spec.nodes.max=4
      kdist diff job.yaml --backend jobset
      KUBECTL_EXTERNAL_DIFF="colordiff -u" kdist diff jobs/

    \b
    Exit codes:
      0 nothing would change   1 something would   2 and above: an error
    """
    from kdist import deploy

    found: list[Difference] = []
    try:
        for job, base in options.read_jobs([*files, *more], sets, backend=backend):
            cluster = options.connect(**where, job=job.metadata.namespace)
            found += deploy.compare(
                cluster, deploy.make_plan(cluster, job, base=base), force=force_conflicts
            )
    except KdistError as error:
        if error.code == Code.ERROR:  # 1 means a difference here
            error.code = Code.USAGE
        raise
    if not found:
        return Code.OK
    external = os.environ.get("KDIST_EXTERNAL_DIFF") or os.environ.get("KUBECTL_EXTERNAL_DIFF")
    if external:
        return _show_with(shlex.split(external), found)
    for each in found:
        for line in each.lines():
            console.result(
                click.style(line, fg=_COLORS.get(line[:1])) if line[:1] in _COLORS else line
            )
    return DIFFERENT


def _show_with(program: Sequence[str], found: Sequence[Difference]) -> int:
    """Run the user's own program on two folders; its exit code where it keeps to diff's, 0 and
    1.
    """
    with tempfile.TemporaryDirectory(prefix="kdist-diff-") as folder:
        live, merged = Path(folder, "live"), Path(folder, "merged")
        for side in (live, merged):
            side.mkdir()
        for each in found:
            name = each.manifest.title.replace("/", ".") + ".yaml"
            (live / name).write_text(each.text(each.before))
            (merged / name).write_text(each.text(each.after))
        try:
            done = subprocess.run([*program, str(live), str(merged)], check=False)
        except OSError as error:
            raise KdistError(
                f"{program[0]}: {error.strerror}",
                hint="KUBECTL_EXTERNAL_DIFF names it",
                code=Code.USAGE,
            ) from error
    return done.returncode
