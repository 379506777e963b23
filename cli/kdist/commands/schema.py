"""`kdist schema`: the JSON Schema of job.yaml."""

from __future__ import annotations

from pathlib import Path

import click

from kdist import console
from kdist.errors import UsageError


@click.command
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write instead of stdout.",
)
def command(out: Path | None) -> None:
    r"""Print the JSON Schema of job.yaml.

    \b
    Examples:
      kdist schema
      kdist schema --out .kdist/job.schema.json
      kdist schema | jq '."$defs".Spec.properties | keys'
    """
    from kdist.spec import reference

    if out is None:
        console.result(reference.schema_text().rstrip("\n"))
        return
    try:
        out.write_text(reference.schema_text(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write `{out}`: {error.strerror}") from None
    console.message(f"Wrote {out}.")
