"""Options and arguments that commands share. Not a command itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(value: str) -> float:
    """Parse a duration as kubectl writes it (`90s`, `5m`, `1h30m`), or a number of seconds; returns
    seconds. For click's `type=`.
    """
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if not re.fullmatch(r"(\d+[smhd])+", value):
        raise click.BadParameter(f"`{value}` is not a duration; write 90s, 5m or 1h30m")
    return float(
        sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", value))
    )


# key of the login options in click's `Context.meta`
LOGIN = "kdist.login"


def cluster_options(command: Command) -> Command:
    """Add the options that choose a cluster and an identity.

    The command receives `namespace`, `context` and `timeout`, and passes them to `targets.connect`.
    It does not receive `--kubeconfig`, `--as`, `--as-group` and `--request-timeout`: `targets`
    reads them from click's context.
    """
    decorators = (
        click.option(
            "-n",
            "--namespace",
            metavar="NAME",
            help="Namespace (default: the job file's, else the kubeconfig's).",
        ),
        click.option(
            "--context",
            metavar="NAME",
            help="Context of the kubeconfig (default: current).",
        ),
        _login("--kubeconfig", metavar="FILE", help="Instead of $KUBECONFIG or ~/.kube/config."),
        _login(
            "--as",
            metavar="USER",
            help="Act as this user, or system:serviceaccount:NAMESPACE:NAME.",
        ),
        _login(
            "--as-group",
            metavar="GROUP",
            multiple=True,
            help="Also act as a member of this group; may be repeated.",
        ),
        click.option(
            "--timeout", type=seconds, metavar="DURATION", help="How long to wait, e.g. 90s or 5m."
        ),
        _login(
            "--request-timeout",
            type=seconds,
            metavar="DURATION",
            help="Timeout of a single request; 0 for none.",
        ),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def _login(name: str, **how: Any) -> Callable[[Command], Command]:
    """An option that is stored for `targets.connect` and not passed to the command."""

    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None and value != ():
            context.meta.setdefault(LOGIN, {})[parameter.name] = value

    return click.option(
        name, f"login_{name.strip('-').replace('-', '_')}", expose_value=False, callback=keep, **how
    )


def output_option(*formats: str, default: str = "table") -> Callable[[Command], Command]:
    """Add `-o/--output` with these formats; the command receives `output`. `jsonpath` stands for
    `jsonpath=TEMPLATE`.
    """
    kinds = [default, *(each for each in formats if each != default)]

    def check(_: click.Context, __: click.Parameter, value: str) -> str:
        if value in kinds or (value.startswith("jsonpath=") and "jsonpath" in kinds):
            return value
        raise click.BadParameter(f"`{value}` is not one of {', '.join(kinds)}")

    shown = "|".join(f"{each}=…" if each == "jsonpath" else each for each in kinds)
    return click.option(
        "-o",
        "--output",
        default=default,
        metavar=shown,
        callback=check,
        help="Output format.",
    )


def job_argument(command: Command) -> Command:
    """Add the job: NAME, or a job file as argument or with `-f`. The command receives `job` and
    `file`, and passes them to `find_job`.
    """
    command = click.option(
        "-f", "--filename", "file", metavar="FILE", help="Take name and namespace from a job file."
    )(command)
    return click.argument("job", required=False, metavar="NAME|FILE")(command)


def files_argument(command: Command) -> Command:
    """Add job files, folders of them and `-`, as arguments or with `-f`. The command receives
    `files` and `more`, and passes them to `read_jobs`.
    """
    command = click.option(
        "-f",
        "--filename",
        "more",
        multiple=True,
        metavar="FILE",
        help="Another job file; may be repeated.",
    )(command)
    return click.argument("files", nargs=-1, metavar="[FILE|DIRECTORY|-]...")(command)


def backend_option(command: Command) -> Command:
    """Add `--backend`; the command passes `backend` to `read_jobs` or `choose_backend`."""
    text = "Workload kind, instead of the job's: job, statefulset, jobset, pytorchjob, trainjob."
    return click.option("--backend", metavar="KIND", help=text)(command)


def dry_run_option(command: Command) -> Command:
    """Add `--dry-run`; the command receives `dry_run`: none, client or server."""
    choice = click.Choice(["none", "client", "server"])
    return click.option(
        "--dry-run",
        type=choice,
        default="none",
        help="Change nothing: `client` only prints the change, `server` has the server check it.",
    )(command)


def wait_option(command: Command) -> Command:
    """Add `--wait/--no-wait`; the command receives `wait`."""
    return click.option(
        "--wait/--no-wait", default=True, show_default=True, help="Wait for completion."
    )(command)
