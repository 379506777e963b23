"""The `kdist` command: which commands there are, and the one place where an error becomes text and
an exit code.

Commands are loaded when they are called. The table below holds all that `kdist --help` shows of
them, so help, `--version` and completion import none of the heavy libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from kdist import __version__, console
from kdist.errors import Code, KdistError, UsageError

# section -> command -> its line in `kdist --help`. The command's code is
# `kdist.commands.<name>:command`, with `_` for each `-`.
COMMANDS: dict[str, dict[str, str]] = {
    "Write": {
        "init": "Write a job.yaml to start from.",
        "validate": "Check job files and show every problem at once.",
        "explain": "Describe a field of job.yaml.",
        "schema": "Print the JSON Schema of job.yaml.",
    },
    "Run": {
        "run": "Run a job, or a script, as processes on this machine.",
        "bench": "Measure collectives among ranks, here or on a cluster.",
    },
    "Cluster": {
        "render": "Show the Kubernetes objects that a job becomes.",
        "apply": "Send jobs to a cluster.",
        "diff": "Show what sending jobs would change.",
        "get": "List the jobs of a cluster.",
        "status": "Show what a job is doing: phase, ranks, step, loss, checkpoint.",
        "logs": "Show what all ranks of a job say, with the pod in front.",
        "wait": "Wait until a job is done, or has come as far as asked.",
        "events": "Show what the cluster says about a job.",
        "why": "Say why a job does not do what it should, and what helps.",
        "top": "Show what every rank spends its steps on, and who is slow.",
        "profile": "Record the next steps of a running job, and show their time.",
        "metrics": "Show what the agents of a job measure, without Prometheus.",
        "report": "Show where the time of a run went: its goodput receipt.",
        "checkpoints": "List a run's checkpoints, verify them, or export weights.",
        "exec": "Run a command in the pod of a rank.",
        "port-forward": "Let ports of this machine end in the pod of a rank.",
        "scale": "Change the number of nodes of a job while it runs.",
        "suspend": "Let a job save its state and give its machines back.",
        "resume": "Let a suspended or stopped job go on from the step it saved.",
        "restart": "Start all ranks of a job anew, from its last checkpoint.",
        "stop": "Let a job save its state and end.",
        "delete": "Take jobs off a cluster; their checkpoints stay.",
    },
    "Admin": {
        "doctor": "Check what a cluster, and this machine, can do for a job.",
        "dashboards": "Write the Grafana dashboards, or draw them from a Prometheus.",
        "completion": "Print the completion script of a shell.",
        "version": "Show the versions of kdist and what it runs on.",
    },
}


def keep_lines(text: str) -> str:
    r"""Help with click's mark for paragraphs that keep their lines, which a raw docstring holds as
    the two characters `\b`.
    """
    return text.replace("\\b\n", "\b\n")


class Commands(click.Group):
    """A group that imports a command only when it is called, and ends every run with an exit code
    of ours.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names of all commands, in the order of the help."""
        return [name for section in COMMANDS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None if there is no such name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(
            f"kdist.commands.{cmd_name.replace('-', '_')}"
        ).command
        # a group's own commands too
        for each in (command, *getattr(command, "commands", {}).values()):
            each.help = keep_lines(each.help or "")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is called; a near miss gets a suggestion."""
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"did you mean `kdist {near[0]}`?" if near else ""
            raise UsageError(
                f"there is no command `{args[0]}`", hint=hint, next_command="kdist --help"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The sections of `kdist --help`, from the table alone."""
        width = max(len(name) for section in COMMANDS.values() for name in section)
        for section, commands in COMMANDS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: ARG002 - click's signature; we are always the last to see an error
        **extra: Any,
    ) -> Any:
        """Run the command line and exit; every way out of it is an exit code."""
        try:
            code = super().main(
                args, prog_name or "kdist", complete_var, standalone_mode=False, **extra
            )
        except Exception as error:  # noqa: BLE001 - the one door: whatever happens becomes text and a code
            code = report(error)
        except KeyboardInterrupt:
            code = report(click.Abort())
        sys.exit(int(code) if isinstance(code, int) else Code.OK)


def report(error: Exception) -> int:
    """Print an error for a person and return the exit code for a script."""
    if os.environ.get("KDIST_DEBUG"):
        import traceback

        console.message("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, KdistError):
        if error.code == Code.FORBIDDEN:
            _advise(error)
        console.error(error)
        return error.code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        console.message(error.format_message())
        return Code.USAGE
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        next_command = f"{context.command_path} --help" if context else ""
        console.error(KdistError(error.format_message().rstrip("."), next_command=next_command))
        return Code.USAGE if isinstance(error, click.UsageError) else Code.ERROR
    if isinstance(error, click.Abort):
        console.message("Interrupted.")
        return Code.INTERRUPTED
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) has gone: nobody is left to tell
        console.drop_results()
        return Code.ERROR
    if isinstance(error, OSError):
        console.error(
            KdistError(
                f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
            )
        )
        return Code.ERROR
    again = KdistError(
        f"kdist itself failed: {type(error).__name__}: {error}",
        hint="this is a bug in kdist; set KDIST_DEBUG=1 to see where, and please report it",
    )
    console.error(again)
    return Code.ERROR


def _advise(error: KdistError) -> None:
    """Add to the server's own refusal whom to ask for what: it knows no roles of the chart."""
    from kdist import rbac
    from kdist.cluster import ApiError

    if isinstance(error, ApiError) and error.denied is not None:
        error.hint = error.hint or rbac.advise([error.denied.right], error.denied.namespace)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "`kdist COMMAND --help` tells more. KDIST_DEBUG=1 shows tracebacks; NO_COLOR turns "
        "colour off."
    ),
)
@click.version_option(__version__, message="kdist %(version)s")
def cli() -> None:
    r"""One job.yaml becomes a distributed PyTorch training, here or on any Kubernetes.

    \b
    Examples:
      kdist init                       write a job.yaml that trains digits
      kdist run job.yaml               train on this machine
      kdist explain spec.train         what the fields mean
    """


cli.help = keep_lines(cli.help or "")


def complete() -> None:
    """Answer kubectl, which asks its plugins for completions by a program of its own: one per line,
    then what to do with them.
    """
    from click.shell_completion import ShellComplete

    *words, incomplete = sys.argv[1:] or [""]
    for item in ShellComplete(cli, {}, "kdist", "_KDIST_COMPLETE").get_completions(
        words, incomplete
    ):
        console.result(str(item.value) if item.type == "plain" else incomplete)
    console.result(":4")  # kubectl's word for: these are all, do not offer files beside them
