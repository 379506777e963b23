"""Questions to the user before something is done that she may not expect. Not a command itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from kdist import console
from kdist.commands.options import ACCEPTED
from kdist.errors import UsageError


def confirm(what: str, question: str, *, hint: str = "add --yes to confirm") -> None:
    """Ask for confirmation. Raises `UsageError` without a terminal, which says `what`, and
    `click.Abort` for a no.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(what, hint=hint)
    console.ask(question)


def approve(what: str, lines: Sequence[str]) -> None:
    """Show objects that only a job's ConfigMap vouches for, and ask whether they are to be sent.
    Raises as `confirm` does.
    """
    for line in lines:
        console.message(line)
    context = click.get_current_context(silent=True)
    if context is not None and context.meta.get(ACCEPTED):
        console.warning(what)
        return
    hint = "`kdist apply` with the job file sends what the file says; --accept-changes sends this"
    confirm(what, f"{what}. Send it?", hint=hint)
