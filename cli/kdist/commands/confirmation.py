"""Questions to the user before something is done that she may not expect. Not a command itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from kdist import console
from kdist.commands.options import CONFIRMED
from kdist.errors import UsageError


def is_confirmed() -> bool:
    """Whether the user has given `--yes`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(CONFIRMED))


def confirm(what: str, question: str, *, hint: str = "add --yes to confirm") -> None:
    """Ask for confirmation, unless `--yes` was given. Raises `UsageError` without a terminal, which
    says `what`, and `click.Abort` for a no.
    """
    if is_confirmed():
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(what, hint=hint)
    click.confirm(question, abort=True, err=True)


def approve(what: str, lines: Sequence[str]) -> None:
    """Show objects that only a job's ConfigMap vouches for, and ask whether they are to be sent.
    Raises as `confirm` does.
    """
    for line in lines:
        console.message(line)
    if is_confirmed():
        console.warning(what)
        return
    hint = "`kdist apply` with the job file sends what the file says; --yes sends this"
    confirm(what, f"{what}. Send it?", hint=hint)
