"""The `kdist` command: the table of its commands, and the conversion of errors to text and an exit
code.

A command's module is imported when the command is called. The table below contains everything that
`kdist --help` shows, so help, `--version` and completion import no heavy libraries.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from kdist import __version__, console, slices
from kdist.commands import options
from kdist.errors import Code, JobNotFoundError, KdistError, UsageError

# section -> command -> its line in `kdist --help`. The command's code is
# `kdist.commands.<name>:command`, with `_` for each `-`, or `kdist.<slice>.command:command`.
COMMANDS: dict[str, dict[str, str]] = {
    "Write": {
        "init": "Write a job.yaml to start from.",
        "convert": "Convert a PyTorchJob or a launch command to a job.yaml.",
        "validate": "Check job files and show every problem at once.",
        "explain": "Describe a field of job.yaml.",
    },
    "Run": {
        "run": "Run a job, or a script, as processes on this machine.",
        "bench": "Measure collectives between ranks, locally or on a cluster.",
    },
    "Cluster": {
        "render": "Show the Kubernetes objects of a job, without a cluster.",
        "apply": "Apply jobs to a cluster.",
        "diff": "Show what applying jobs would change.",
    },
    "Jobs": {
        "get": "List the jobs of a cluster and the runs on this machine.",
        "status": "Show what a job is doing: phase, ranks, step, loss, checkpoint.",
        "logs": "Show the logs of all ranks of a job, prefixed with the pod.",
        "wait": "Wait until a job is done, or reaches another condition.",
        "events": "Show the events of a job.",
        "why": "Explain why a job makes no progress, and how to fix it.",
        "top": "Show how each rank spends its time, and which one is slow.",
        "profile": "Record the next steps of a running job with torch's profiler.",
        "report": "Show where the time of a run went: its goodput report.",
        "checkpoints": "List a run's checkpoints, verify them, or export weights.",
        "exec": "Run a command in the pod of a rank.",
        "port-forward": "Forward local ports to the pod of a rank.",
        "scale": "Change the number of nodes of a job while it runs.",
        "suspend": "Save a job's state and stop it; `resume` continues it.",
        "resume": "Resume a suspended job from the step it saved.",
        "restart": "Restart all ranks of a job from its last checkpoint.",
        "recover": "Replace the pods of a job whose node is gone, or faulty.",
        "drill": "Hurt a running job on purpose, and report how it recovers.",
        "delete": "Delete jobs; their checkpoints stay.",
    },
    "Admin": {
        "doctor": "Check whether a cluster and this machine can run jobs.",
        "dashboards": "Write the Grafana dashboards as JSON.",
        "completion": "Print the completion script for a shell.",
        "version": "Show the versions of kdist and of what it runs on.",
    },
}

# What people type for a command, from kubectl, torchrun and peers -> the command to use.
MEANT = {
    "describe": "kdist status",
    "diagnose": "kdist why",
    "launch": "kdist run",
    "list": "kdist get",
    "log": "kdist logs",
    "ls": "kdist get",
    "metrics": "kdist top -o prom",
    "ps": "kdist get",
    "remove": "kdist delete",
    "rm": "kdist delete",
    "schema": "kdist explain -o jsonschema",
    "start": "kdist run",
    "stop": "kdist suspend",
    "tensorboard": "kdist port-forward NAME tensorboard",
    "train": "kdist run",
}


def keep_lines(text: str) -> str:
    r"""Help with click's mark for paragraphs that keep their lines, which a raw docstring holds as
    the two characters `\b`.
    """
    return text.replace("\\b\n", "\b\n")


def load_command(name: str) -> click.Command:
    """Import the command of this name."""
    if name in slices.COMMANDS:
        module = slices.load(slices.COMMANDS[name], "command")
    else:
        module = import_module(f"kdist.commands.{name.replace('-', '_')}")
    command: click.Command = module.command
    return command


def sections() -> dict[str, dict[str, str]]:
    """The part of `COMMANDS` that this installation has."""
    missing = {name for name, each in slices.COMMANDS.items() if not slices.is_installed(each)}
    return {
        section: {name: line for name, line in commands.items() if name not in missing}
        for section, commands in COMMANDS.items()
    }


class Commands(click.Group):
    """A group that imports a command only when it is called, and always exits with a `Code`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [name for section in sections().values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None if there is no such name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command = load_command(cmd_name)
        # a group's own commands too
        for each in (command, *getattr(command, "commands", {}).values()):
            each.help = keep_lines(each.help or "")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the called command; a misspelled name gets a suggestion. `help COMMAND` is
        `COMMAND --help`.
        """
        if args[:1] == ["help"]:
            if len(args) == 1:
                console.document(ctx.get_help())
                ctx.exit()
            args = [*args[1:], "--help"]
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            meant = MEANT.get(args[0]) or (f"kdist {near[0]}" if near else "")
            hint = f"did you mean `{meant}`?" if meant else ""
            raise UsageError(
                f"there is no command `{args[0]}`", hint=hint, next_command="kdist --help"
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; the error of a job that does not exist says where else kdist looked."""
        try:
            return super().invoke(ctx)
        except JobNotFoundError as error:
            error.hint = error.hint or ctx.meta.get(options.NOT_HERE, "")
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The sections of `kdist --help`, from the table alone."""
        width = max(len(name) for section in COMMANDS.values() for name in section)
        for section, commands in sections().items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: ARG002 - click's signature; errors are always handled here
        **extra: Any,
    ) -> Any:
        """Run the command line and exit; every error becomes an exit code."""
        if "_KDIST_COMPLETE" in os.environ:
            _prepare_completion()
        words = list(sys.argv[1:] if args is None else args)
        console.answer.begin(*_guess_output(words))
        try:
            code = super().main(
                words, prog_name or "kdist", complete_var, standalone_mode=False, **extra
            )
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every error becomes text and an exit code here
            code = report(error)
        sys.exit(int(code) if isinstance(code, int) else Code.OK)


def _guess_output(words: Sequence[str]) -> tuple[str, bool]:
    """The format that a command line seems to ask for, in case it cannot be read, and whether with
    one document per line.
    """
    own = "\0".join(["", *(words[: words.index("--")] if "--" in words else words), ""])
    stream = "\0(-w|--watch|port-forward)\0|\0logs\0(.*\0)?(-f|--follow)\0"
    is_json = re.search("\0(-o\0?|--output[\0=])json\0", own)
    return "json" if is_json else "", re.search(stream, own) is not None


def _prepare_completion() -> None:
    """Print nothing but completions on the terminal, and let no credential plugin ask a person."""
    from kdist.commands.completion import register_shells

    register_shells()
    if not os.environ.get("KDIST_DEBUG"):
        silence = os.open(os.devnull, os.O_RDWR)
        os.dup2(silence, 0)
        os.dup2(silence, 2)


def report(error: BaseException) -> int:
    """Print an error for a person, and for a program that asked for JSON; return the exit code."""
    if os.environ.get("KDIST_DEBUG"):
        import traceback

        console.message("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        console.message(error.format_message())
        return Code.USAGE
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) has gone
        console.drop_results()
        return Code.ERROR
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        known = (each for each in (error.__cause__ or error).args if isinstance(each, int))
        number = next(known, signal.SIGINT)
        is_key = number == signal.SIGINT
        what = "interrupted" if is_key else f"ended by {signal.Signals(number).name}"
        problem = KdistError(what, code=Code(128 + number))
        console.message(f"{what[0].upper()}{what[1:]}.")
    else:
        problem = _explain(error)
        console.error(problem)
    console.fail(problem)
    return problem.code


def _explain(error: BaseException) -> KdistError:
    """The error in words, with its exit code."""
    if isinstance(error, KdistError):
        if error.code == Code.FORBIDDEN:
            from kdist import rbac
            from kdist.cluster import ApiError

            if isinstance(error, ApiError) and error.denied is not None:
                error.hint = error.hint or rbac.advise([error.denied.right], error.denied.namespace)
        return error
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        return KdistError(
            error.format_message().rstrip("."),
            next_command=f"{context.command_path} --help" if context else "",
            code=Code.USAGE if isinstance(error, click.UsageError) else Code.ERROR,
        )
    if isinstance(error, OSError):
        words = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
        return KdistError(words)
    return KdistError(
        f"internal error: {type(error).__name__}: {error}",
        hint="this is a bug in kdist; please report it with the traceback that KDIST_DEBUG=1 shows",
    )


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "See `kdist COMMAND --help` for details; every command takes -o json. KDIST_DEBUG=1 shows "
        "tracebacks; NO_COLOR disables color."
    ),
)
@options.options_before_command
@click.version_option(__version__, message="kdist %(version)s")
def cli() -> None:
    r"""Run distributed PyTorch training from one job.yaml, locally or on any Kubernetes cluster.

    \b
    Examples:
      kdist init                       write a job.yaml that trains digits
      kdist run job.yaml               train on this machine
      kdist explain spec.train         what the fields mean
    """


cli.help = keep_lines(cli.help or "")


def complete() -> None:
    """Complete `kubectl kdist`: kubectl runs its plugins' completion program, and reads one
    completion per line, then a directive.
    """
    from click.shell_completion import ShellComplete

    _prepare_completion()
    *words, incomplete = sys.argv[1:] or [""]
    found = ShellComplete(cli, {}, "kdist", "_KDIST_COMPLETE").get_completions(words, incomplete)
    values = [str(item.value) for item in found if item.type == "plain"]
    for value in values:
        console.result(value)
    # kubectl's directive: 0 offers files if there is nothing else, 4 never, 2 adds no space
    files = any(item.type != "plain" for item in found)
    unfinished = any(value.endswith((".", "=")) for value in values)
    console.result(f":{(0 if files else 4) + (2 if unfinished else 0)}")
