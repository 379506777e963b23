"""Options and arguments that commands share. Not a command itself."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kdist import console
from kdist.units import parse_duration

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from kdist.job.find import Place


Command = TypeVar("Command", bound=Callable[..., Any])


def seconds(value: str) -> float:
    """`parse_duration` for click's `type=`."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


BACKENDS = ("job", "statefulset", "pytorchjob", "jobset", "trainjob")
"""The names in `kdist.backends`, which help texts do not import: it takes too long."""
# key of the login options in click's `Context.meta`
LOGIN = "kdist.login"
# key of the hint of a `JobNotFoundError`: where a run of that name was looked for too
NOT_HERE = "kdist.not-here"
# key of the namespace and the context that stand before the command
_BEFORE = "kdist.before"


def find_place(
    invocation: click.Context | None, namespace: str | None = None, context: str | None = None
) -> Place:
    """The place that these options and those of the login choose."""
    from kdist.job.find import Place

    login = {} if invocation is None else invocation.meta.get(LOGIN, {})
    chosen = (
        ("--context", context),
        ("--kubeconfig", login.get("login_kubeconfig")),
        ("--as", login.get("login_as")),
        *(("--as-group", group) for group in login.get("login_as_group", ())),
    )
    words = (f"{option} {shlex.quote(value)}" for option, value in chosen if value)
    console.answer.place = " ".join(words)
    return Place(
        namespace,
        context,
        login.get("login_kubeconfig"),
        login.get("login_as", ""),
        tuple(login.get("login_as_group", ())),
        login.get("login_request_timeout"),
    )


def _place_for_completion(context: click.Context) -> Place:
    """The place that is chosen before the word that is completed."""
    before = context.meta.get(_BEFORE, {})
    names = ("namespace", "context")
    return find_place(context, *(context.params.get(each) or before.get(each) for each in names))


def complete_file(
    _: click.Context,
    __: click.Parameter,
    word: str,
) -> list[CompletionItem[Any]]:
    """Offer files. For click's `shell_complete=`, as the other functions `complete_*`."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(word, type="file")]


def complete_job(
    context: click.Context, _: click.Parameter, word: str
) -> list[CompletionItem[Any]]:
    """Offer the names of jobs and of runs on this machine, and files."""
    from click.shell_completion import CompletionItem

    names = complete_name(context, _, word)
    return [CompletionItem(word, type="file"), *map(CompletionItem, names)]


def complete_name(context: click.Context, _: click.Parameter, word: str) -> list[str]:
    """Offer the names of jobs and of runs on this machine."""
    from kdist import completion

    names = completion.job_names(
        _place_for_completion(context), local=bool(context.params.get("local"))
    )
    return [name for name in names if name.startswith(word)]


def complete_field(_: click.Context, __: click.Parameter, word: str) -> list[str]:
    """Offer the fields of job.yaml."""
    from kdist import completion

    return completion.fields(word)


def _complete_setting(_: click.Context, __: click.Parameter, word: str) -> list[str]:
    """Offer fields of job.yaml, and after the `=` their values."""
    from kdist import completion

    return completion.settings(word)


def _complete_backend(_: click.Context, __: click.Parameter, word: str) -> list[str]:
    from kdist import completion

    return [each for each in completion.backends() if each.startswith(word)]


def _complete_place(context: click.Context, option: click.Parameter, word: str) -> list[str]:
    """Offer the namespaces of the cluster, or the contexts of the kubeconfig."""
    from kdist import completion

    names = completion.contexts if option.name == "context" else completion.namespaces
    found = names(_place_for_completion(context))
    return [each for each in found if each.startswith(word)]


def _kept(key: str, *names: str, **how: Any) -> Callable[[Command], Command]:
    """An option that is stored in click's `Context.meta` and not passed to the command."""

    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None and value != ():
            context.meta.setdefault(key, {})[parameter.name] = value

    return click.option(*names, expose_value=False, callback=keep, **how)


# key of `--accept-changes` in click's `Context.meta`
ACCEPTED = "kdist.accepted"


def accept_option(command: Command) -> Command:
    """Add `--accept-changes`, which `confirmation.approve` looks for."""

    def keep(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.meta[ACCEPTED] = value

    return click.option(
        "--accept-changes",
        is_flag=True,
        expose_value=False,
        callback=keep,
        help="Do not ask where the job's ConfigMap differs from what runs, or nothing runs.",
    )(command)


_IDENTITY = (
    _kept(
        LOGIN,
        "--kubeconfig",
        "login_kubeconfig",
        metavar="FILE",
        shell_complete=complete_file,
        help="Instead of $KUBECONFIG or ~/.kube/config.",
    ),
    _kept(
        LOGIN,
        "--as",
        "login_as",
        metavar="USER",
        help="Act as this user, or system:serviceaccount:NAMESPACE:NAME.",
    ),
    _kept(
        LOGIN,
        "--as-group",
        "login_as_group",
        metavar="GROUP",
        multiple=True,
        help="Also act as a member of this group; may be repeated.",
    ),
)
_REQUEST_TIMEOUT = _kept(
    LOGIN,
    "--request-timeout",
    "login_request_timeout",
    type=seconds,
    metavar="DURATION",
    help="Timeout of a single request; 0 for none.",
)


def cluster_options(command: Command) -> Command:
    """Add the options that choose a cluster and an identity.

    The command receives `namespace`, `context` and `timeout`, and passes them to `targets`. It does
    not receive `--kubeconfig`, `--as`, `--as-group` and `--request-timeout`: `find_place` reads
    them from click's context.
    """
    helps = (" (default: the job file's, else the kubeconfig's).", " (default: current).")
    timeout = click.option(
        "--timeout", type=seconds, metavar="DURATION", help="How long to wait, e.g. 90s or 5m."
    )
    make = partial(click.option, callback=_or_before)
    return _decorate(command, *_where(make, *helps), *_IDENTITY, timeout, _REQUEST_TIMEOUT)


def options_before_command(command: Command) -> Command:
    """Add the options of kubectl that may stand before the command too. A value after the command
    wins; a command that asks no cluster ignores them.
    """
    where = _where(partial(_kept, _BEFORE), ".", ".")
    return _decorate(command, *where, *_IDENTITY, _REQUEST_TIMEOUT)


def _where(make: Callable[..., Any], of_namespace: str, of_context: str) -> Iterator[Any]:
    """The options that choose a namespace and a context, with the ends of their help."""
    yield make(
        "-n",
        "--namespace",
        metavar="NAME",
        shell_complete=_complete_place,
        help=f"Namespace{of_namespace}",
    )
    yield make(
        "--context",
        metavar="NAME",
        shell_complete=_complete_place,
        help=f"Context of the kubeconfig{of_context}",
    )


def _decorate(command: Command, *decorators: Callable[[Command], Command]) -> Command:
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def _or_before(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """The option's value, else the one that stands before the command."""
    return context.meta.get(_BEFORE, {}).get(parameter.name) if value is None else value


def output_option(*kinds: str, text: str = "Output format.") -> Callable[[Command], Command]:
    """Add `-o/--output` with these formats, the first by default; the command receives `output`."""

    def check(context: click.Context, _: click.Parameter, value: str) -> str:
        if value in kinds:
            console.answer.output = value
            return value
        wants_path = value.startswith("jsonpath") and "json" in kinds
        instead = "; use `-o json | jq .FIELD`" if wants_path else ""
        if any(each.name == "out" for each in context.command.params):
            instead = instead or f"; name what to write with --out {shlex.quote(value)}"
        raise click.BadParameter(f"`{value}` is not one of {', '.join(kinds)}{instead}")

    return click.option(
        "-o",
        "--output",
        default=kinds[0],
        metavar="|".join(kinds),
        callback=check,
        is_eager=True,  # so that errors in other options are printed in it
        shell_complete=lambda _, __, word: [each for each in kinds if each.startswith(word)],
        help=text,
    )


def job_argument(command: Command) -> Command:
    """Add the job: NAME, or a job file as argument or with `-f`. The command receives `job` and
    `file`, and passes them to `targets.find`.
    """
    return click.argument("job", required=False, metavar="NAME|FILE", shell_complete=complete_job)(
        filename_option()(command)
    )


def filename_option(
    text: str = "Take name and namespace from a job file.", *, several: bool = False
) -> Callable[[Command], Command]:
    """Add `-f`; the command receives `file`, or several files as `more`."""
    return click.option(
        "-f",
        "--filename",
        "more" if several else "file",
        multiple=several,
        metavar="FILE",
        shell_complete=complete_file,
        help=text,
    )


def out_option(text: str, *, folder: bool = False) -> Callable[[Command], Command]:
    """Add `--out`; the command receives the file or folder to write as `out`."""
    kind = click.Path(file_okay=not folder, dir_okay=folder, path_type=Path)
    return click.option("--out", type=kind, help=text)


def local_option(command: Command) -> Command:
    """Add `--local`; the command passes `local` to `targets.find`."""
    text = "Use the `kdist run` on this machine, even if -n or a cluster is set."
    return click.option("--local", is_flag=True, help=text)(command)


def files_argument(command: Command) -> Command:
    """Add job files, folders of them and `-`, as arguments or with `-f`. The command receives
    `files` and `more`, and passes them to `read_jobs`.
    """
    return click.argument(
        "files", nargs=-1, metavar="[FILE|DIRECTORY|-]...", shell_complete=complete_file
    )(filename_option("Another job file; may be repeated.", several=True)(command))


def set_option(command: Command) -> Command:
    """Add `--set`; the command passes `sets` as overrides when it loads a job."""
    return click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="PATH=VALUE",
        shell_complete=_complete_setting,
        help="Change a field of the job, e.g. spec.nodes=4; may be repeated.",
    )(command)


def backend_option(command: Command) -> Command:
    """Add `--backend`; the command passes `backend` to `read_jobs` or `choose_backend`."""
    text = f"Workload kind, instead of the job's: {', '.join(BACKENDS)}."
    return click.option("--backend", metavar="KIND", shell_complete=_complete_backend, help=text)(
        command
    )


def dry_run_option(command: Command) -> Command:
    """Add `--dry-run`; the command receives `dry_run`: none, client or server."""
    choice = click.Choice(["none", "client", "server"])
    return click.option(
        "--dry-run",
        type=choice,
        default="none",
        help="Change nothing: `client` only prints the change, `server` has the server check it.",
    )(command)


def preview_option(command: Command) -> Command:
    """Add `--dry-run` where the server cannot check the change; the command receives `dry_run`."""
    return click.option(
        "--dry-run",
        type=click.Choice(["none", "client"]),
        default="none",
        help="Show what would be done, without doing it.",
    )(command)


def pod_options(command: Command) -> Command:
    """Add the options that choose a pod of the job; the command receives `rank` and `pod`."""
    return _decorate(
        command,
        click.option(
            "--rank",
            type=click.IntRange(min=0),
            help="The pod that runs this rank (default: rank 0).",
        ),
        click.option("--pod", default="", metavar="NAME", help="This pod."),
    )


def wait_option(command: Command) -> Command:
    """Add `--wait/--no-wait`; the command receives `wait`."""
    return click.option(
        "--wait/--no-wait", default=True, show_default=True, help="Wait for completion."
    )(command)
