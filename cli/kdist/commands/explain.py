"""`kdist explain`: what a field of job.yaml is."""

from __future__ import annotations

import click

from kdist import console, slices
from kdist.commands import options
from kdist.errors import NotFoundError, UsageError


@click.command
@click.argument("field", default="", metavar="[FIELD]", shell_complete=options.complete_field)
@click.option("-r", "--recursive", is_flag=True, help="Show all nested fields too.")
@options.output_option(
    *("text", "json", "yaml", "markdown", "jsonschema", "crd"),
    text="Output format; jsonschema is the JSON Schema of the whole file, crd the definition by "
    "which a cluster stores it.",
)
def command(field: str, recursive: bool, output: str) -> None:
    r"""Describe a field of job.yaml.

    \b
    Examples:
      kdist explain spec
      kdist explain spec.train.checkpoint.every
      kdist explain --recursive | less
      kdist explain -o jsonschema > .kdist/job.schema.json
      kdist explain -o crd | kubectl apply --server-side -f -

    Exits with 4 if there is no such field.
    """
    from kdist.spec import reference

    if output in ("jsonschema", "crd"):
        if field:
            raise UsageError(
                f"-o {output} describes the whole file and cannot be combined with FIELD",
                next_command=f"kdist explain -o {output}",
            )
        if output == "crd":
            text = slices.load("crd", "definition").text()
        else:
            text = reference.schema_text()
        console.document(text.rstrip("\n"))
        return
    found = reference.look_up(field)
    if found is None:
        raise _unknown(field)
    if output == "text":
        console.document(reference.describe(found, recursive=recursive))
    elif output == "markdown":
        console.document(reference.table(found))
    else:
        answer = reference.document(found, recursive=recursive)
        console.emit(answer, kind="Field", output=output)


def _unknown(field: str) -> NotFoundError:
    from kdist.spec import reference

    if hint := reference.REMOVED.get(field):
        return NotFoundError(f"`{field}` no longer exists", hint=hint)
    near = reference.near_path(reference.parse(field.replace("[]", "[0]")) or (field,)).replace(
        "[0]", "[]"
    )
    hint = f"did you mean `{near}`?" if near else ""
    return NotFoundError(
        f"job.yaml has no field `{field}`",
        hint=hint,
        next_command=f"kdist explain {near}" if near else "kdist explain -r",
    )
