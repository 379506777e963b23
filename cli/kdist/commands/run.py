"""`kdist run`: a job.yaml, or a script, as processes on this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import Code, KdistError, Problem, UsageError
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.events import Entry
    from kdist.job.local import Display, RunEnded
    from kdist.job.local.progress import Progress
    from kdist.spec import TrainingJob

_HINT = "Ctrl-C saves and stops; twice exits without saving"
_HINT_WITHOUT_SAVING = "Ctrl-C stops; twice exits at once"
_JOB_SUFFIXES = (".yaml", ".yml", ".json")


def is_script(file: str) -> bool:
    """Whether `file` is a Python script and not a job, by its suffix or its first line."""
    path = Path(file)
    if file == "-" or path.suffix in _JOB_SUFFIXES:
        return False
    if path.suffix == ".py":
        return True
    try:
        with path.open("rb") as opened:
            first = opened.readline(200)
    except OSError:
        return False  # reading it as a job reports the error
    return first.startswith(b"#!") and b"python" in first


class RunCommand(click.Command):
    """Options may follow a job file; arguments after a script are passed to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Find the file first, because it decides how to parse the arguments after it."""
        ctx.allow_interspersed_args = False
        found, _, _ = self.make_parser(ctx).parse_args(list(args))
        file = found.get("file")
        ctx.allow_interspersed_args = not (
            isinstance(file, str) and (found.get("module") or is_script(file))
        )
        if ctx.allow_interspersed_args and isinstance(file, str) and not Path(file).exists():
            _refuse_launcher(file, args[args.index(file) + 1 :])
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run; who has started the run in the background is told its error."""
        from kdist.job.local import LauncherLink

        ctx.obj = launcher = LauncherLink.take()
        try:
            return super().invoke(ctx)
        except KdistError as error:
            if launcher is not None:
                launcher.report_error(error)
            raise


def _refuse_launcher(file: str, args: list[str]) -> None:
    """Raise if the command is torchrun's, accelerate's or another launcher's behind `kdist run`."""
    script = next((each for each in args if each.endswith(".py")), None)
    if script is not None and Path(file).suffix not in _JOB_SUFFIXES:
        started = shlex.join(args[args.index(script) :])
        raise UsageError(
            f"kdist run starts the ranks itself: remove the launcher `{file}`",
            hint=f"kdist run --procs-per-node N {started}",
        )


@click.command(cls=RunCommand)
@click.argument("file", shell_complete=options.complete_file)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-m",
    "--module",
    is_flag=True,
    help="FILE is the name of a module to run as a script, as in `torchrun -m`.",
)
@click.option(
    "--nodes",
    metavar="N|MIN:MAX",
    help="Agents to start, each as one node; MIN:MAX makes the job elastic.",
)
@click.option("--procs-per-node", metavar="N|auto", help="Ranks on each node.")
@options.set_option
@click.option(
    "--fresh/--resume",
    default=False,
    help="Archive the previous run and start from scratch, or resume it (the default).",
)
@options.output_option("table", "json", text="Format of the end report on stdout.")
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="Run in the background; return once all agents have started, or data is being fetched.",
)
@click.option(
    "--python",
    type=click.Path(),
    metavar="PATH",
    help="Python, or environment, that runs the ranks; that of $VIRTUAL_ENV, else kdist's own.",
)
@click.option(
    "--propagate-exit-code",
    is_flag=True,
    help=f"Exit with the trainer's own code (64 to 75, 200 to 207) instead of {Code.JOB_FAILED}.",
)
def command(
    file: str,
    args: tuple[str, ...],
    *,
    output: str,
    detach: bool,
    propagate_exit_code: bool,
    python: str | None,
    fresh: bool,
    **changes: Any,
) -> int:
    r"""Run a job, or a script, as processes on this machine.

    Every node becomes one agent process with its ranks; agents that die are restarted, and the
    training continues from its last checkpoint. Ctrl-C saves and stops; the same command resumes.
    A script that opens no Checkpointer saves nothing: it is not started again when it fails,
    unless --set spec.maxRestarts=N says so, and the same command starts it from its beginning.
    Checkpoints, logs and reports are in .kdist/NAME (or below $KDIST_HOME). Data and weights by
    URL are fetched first, into ~/.cache/kdist (or $KDIST_CACHE), which all runs share.

    \b
    Examples:
      kdist run job.yaml
      kdist run -d job.yaml                     # in the background
      kdist run job.yaml --nodes 2 --set spec.train.epochs=1
      kdist run job.yaml -o json 2>/dev/null | jq .goodput
      kdist run --nodes 2 --procs-per-node 2 train.py --lr 0.1
      kdist run --procs-per-node 2 -m package.train --lr 0.1

    \b
    Exit codes:
      0 done   2 wrong file or usage   10 the job failed, or could not save when it was stopped
      11 stopped by SIGTERM or SIGHUP   130 stopped by Ctrl-C
    """
    from kdist import render
    from kdist.job import local

    launcher = click.get_current_context().obj
    again = _argv(
        file,
        args,
        output="table" if detach else output,
        propagate=propagate_exit_code,
        python=python,
        **changes,
    )
    job, base = _read_job(file, args, **changes)
    if job.spec.suspend:
        raise UsageError(
            f"{job.metadata.name} has spec.suspend: true, and a suspended job does not run",
            hint="--set spec.suspend=false runs it here, and leaves the file as it is",
        )
    job = job.with_replicas()
    interpreter, which = local.choose_interpreter(python, os.environ)
    if missing := local.describe_missing_gpus(job, os.environ):
        console.warning(missing)
    if detach:
        return _detach(job.metadata.name, file, again, fresh=fresh, output=output)
    if which:
        console.message(which)
    train_json = render.read_train_json(render.render(job))
    live = console.can_draw()
    shown: AbstractContextManager[Display] = _live_display() if live else nullcontext(Lines())
    with console.nonblocking_messages(), shown as display:
        ended = local.run_job(
            job,
            train_json,
            base=base,
            fresh=fresh,
            display=display,
            lines_only=not live,
            command=() if file == "-" else again,
            launcher=launcher,
            warnings=[missing] if missing else [],
            python=interpreter,
        )
    return _finish(ended, shlex.join(again[1:]), output=output, propagate=propagate_exit_code)


def _argv(
    file: str,
    args: tuple[str, ...],
    *,
    output: str,
    propagate: bool,
    python: str | None,
    nodes: str | None,
    procs_per_node: str | None,
    sets: tuple[str, ...],
    module: bool,
) -> list[str]:
    """The arguments after `kdist` that continue this run: without --fresh and --detach."""
    argv = ["run"]
    argv += ["--nodes", nodes] if nodes is not None else []
    argv += ["--procs-per-node", procs_per_node] if procs_per_node is not None else []
    for each in sets:
        argv += ["--set", each]
    argv += ["-o", output] if output != "table" else []
    argv += ["--propagate-exit-code"] if propagate else []
    argv += ["--python", python] if python is not None else []
    argv += ["-m"] if module else []
    return [*argv, file, *args]


def _detach(name: str, file: str, argv: list[str], *, fresh: bool, output: str) -> int:
    """Start the run in the background, and print its name and what to type next."""
    from kdist.job import local

    if file == "-":
        raise UsageError("--detach needs a file; a job on standard input cannot be resumed")
    console.message("starting in the background; this takes as long as importing torch")
    arguments = ["run", "--fresh", *argv[1:]] if fresh else argv
    launched = local.launch_detached(arguments, Path.cwd())
    for line in launched.output.splitlines():
        console.message(line)
    if launched.code != Code.OK:
        code = launched.code if launched.code in Code.__members__.values() else Code.ERROR
        why = launched.output.strip().removeprefix("Error: ")
        console.fail(launched.error or KdistError(why, code=Code(code)))
        return launched.code
    if output == "json":
        started = {"job": name, "pid": launched.pid, "log": launched.log and str(launched.log)}
        console.emit(started, kind="DetachedRun", output=output)
    else:
        console.result(name)
    if not launched.begun:  # it is done
        return Code.OK
    console.message(f"{name} runs in the background; its output is in {launched.log}")
    console.message(f"Next: kdist status {name}")
    console.message(f"      kdist logs -f {name}")
    console.message(f"      kdist suspend {name}")
    return Code.OK


def _read_job(
    file: str,
    args: tuple[str, ...],
    *,
    nodes: str | None,
    procs_per_node: str | None,
    sets: tuple[str, ...],
    module: bool,
) -> tuple[TrainingJob, Path]:
    """Read the job and the folder that its relative paths start from."""
    from kdist.job.local import run_dir
    from kdist.job_file import load_file, load_text, missing
    from kdist.job_file.overrides import OptionOverride

    overrides = list(sets)
    if nodes is not None:
        minimum, colon, maximum = nodes.partition(":")
        if not (minimum.isdecimal() and (maximum.isdecimal() if colon else True)):
            raise UsageError(
                f"--nodes takes a number or MIN:MAX, found `{nodes}`",
                hint="for example --nodes 2, or --nodes 1:4 for an elastic job",
            )
        limits = {"min": int(minimum), "max": int(maximum or minimum)}
        overrides.append(OptionOverride(f"spec.nodes={encode_json(limits)}", f"--nodes {nodes}"))
        overrides.append(OptionOverride("spec.replicas=null", f"--nodes {nodes}"))
    if procs_per_node is not None:
        overrides.append(
            OptionOverride(
                f"spec.procsPerNode={procs_per_node}", f"--procs-per-node {procs_per_node}"
            )
        )
    if module or is_script(file):
        if not module and not Path(file).is_file():
            raise missing(file)
        return load_text(
            encode_json(_job_of_script(file, args, module=module)),
            source=file,
            overrides=overrides,
            use="here",
            generated=True,
        ), Path.cwd()
    if args:
        raise UsageError(
            f"a job takes no arguments of its own, found `{' '.join(args)}`",
            hint="change fields with --set PATH=VALUE",
        )
    looks: list[Problem] = []
    job = load_file(file, overrides=overrides, use="here", warnings=looks)
    for each in looks:
        console.warning(each.advice)
    folder = Path(file).absolute().parent
    return job, Path.cwd() if file == "-" or folder == run_dir.generated() else folder


def _job_of_script(file: str, args: tuple[str, ...], *, module: bool = False) -> dict[str, Any]:
    """Build the job that runs a script. Its name includes the folder: many scripts are main.py."""
    from kdist.spec import job_document
    from kdist.spec.models import LONGEST_JOB_NAME

    path = Path(file.replace(".", "/") if module else file)
    name = re.sub(r"[^a-z0-9]+", "-", f"{path.parent.name}-{path.stem}".lower()).strip("-")
    name = (name if name[:1].isalpha() else f"script-{name}")[-LONGEST_JOB_NAME:]
    name = name.lstrip("-0123456789").strip("-")
    return job_document(name, script={"module" if module else "path": file, "args": list(args)})


class Lines:
    """One line per event on stderr, with stable columns."""

    def show(self, entry: Entry) -> None:
        from kdist import events

        console.message(events.format_line(entry))

    def draw(self, progress: Progress) -> None:  # noqa: ARG002 - Display's signature
        """Draw nothing; lines show the progress."""
        console.flush_messages()


@contextmanager
def _live_display() -> Iterator[Display]:
    from kdist.views import live
    from kdist.views.frame import Frame

    class Live:
        """A view at the foot of the terminal, with events scrolling above it."""

        def show(self, entry: Entry) -> None:
            if not entry.is_progress_bar:  # the view draws these
                drawing.print(live.render_entry(entry))

        def draw(self, progress: Progress) -> None:
            if console.flush_messages():  # otherwise the terminal has not taken the last frame yet
                view = live.from_progress(
                    progress, hint=_HINT if progress.saves else _HINT_WITHOUT_SAVING
                )
                drawing.update(Frame(view))

    with console.drawing() as drawing:
        yield Live()


def _finish(ended: RunEnded, arguments: str, *, output: str, propagate: bool) -> int:
    """Print the report and the final message; return the exit code."""
    from kdist.job.local import end_report

    conclusion = end_report.conclude(ended, arguments)
    error = conclusion if isinstance(conclusion, KdistError) else None
    try:
        if output == "json":
            shown = {**ended.report, "error": None if error is None else error.to_document()}
            console.emit(shown, output="json")
        else:
            console.table(
                end_report.summary_rows(ended.report), header=("RUN", ended.report["job"])
            )
    except OSError:
        # The reader is gone or the disk is full; the exit code still reports the result.
        console.drop_results()
    with suppress(OSError):
        if isinstance(conclusion, KdistError):
            console.error(conclusion)
        else:
            console.message(conclusion)
    return exit_code(ended, propagate=propagate)


def exit_code(ended: RunEnded, *, propagate: bool) -> int:
    """The exit code of `kdist run`; with `propagate` the trainer's, with 128 + N for signal N."""
    if propagate:
        return 128 - ended.outcome.code if ended.outcome.code < 0 else ended.outcome.code
    if ended.outcome.kind == "done":
        return Code.OK
    if ended.outcome.kind == "failed" or ended.save_failed:
        return Code.JOB_FAILED
    return Code.INTERRUPTED if ended.stopped_by == signal.SIGINT else Code.JOB_CANCELLED
