"""A run on this machine as a job: which run folder it is, whether its `kdist run` is active, the
command that starts it again, and what `kdist.job.job.Job` says can be done with it.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from kdist.errors import Code, KdistError, NotFoundError, UsageError
from kdist.events import Entry, read_files
from kdist.job.goals import (
    GOALS,
    describe_continuation,
    describe_status,
    end_error,
    timeout_error,
)
from kdist.job.job import (
    CANNOT_SUSPEND,
    FAILED,
    NOT_SUSPENDED,
    SILENT,
    Change,
    Changed,
    DeleteOptions,
    Deletion,
    Dialog,
    LogSelection,
    describe_kept,
)
from kdist.job.local import agents, run_dir
from kdist.spec import TrainConfig
from kdist.status import JobStatus, Phase, Snapshot, documents
from kdist_trainer.formats import CHECKPOINT, LEDGER

if TYPE_CHECKING:
    from kdist.agents.metrics import AgentSample
    from kdist.diagnose import Diagnosis
    from kdist.job.local.status import RunSnapshot

_CHECKPOINTS = "checkpoints"
_POLL_SECONDS = 0.1
_SPARE_SECONDS = 30.0  # for a run to end, in addition to the grace period of its ranks
_WATCH_SECONDS = 0.5
CONTINUES = "it continues from its last checkpoint"

_WITH_VALUE = ("--nodes", "--procs-per-node", "--set", "-o")  # options, as `kdist run` records them


def _refuses(verb: str, advise: Callable[..., tuple[str, str]]) -> Any:
    """A method of `Job` that is for jobs on a cluster. `advise` takes its arguments, and returns
    what to do here instead: in words, and as a command.
    """

    def method(job: LocalJob, *given: Any, **options: Any) -> NoReturn:
        raise job.refuse(verb, *advise(job, *given, **options))

    return method


def _advise_restart(run: LocalJob, _: Change, *, fresh: bool, **__: bool) -> tuple[str, str]:
    if run.active:
        again = run.next_run_with(fresh=True) if fresh else run.kdist("resume")
        return f"suspend it, then type `{again}`", run.kdist("suspend")
    if fresh or run.is_done:
        reason = "it is done; " if run.is_done else ""
        return f"{reason}--fresh archives it and starts at step 0", run.next_run_with(fresh=True)
    return CONTINUES, run.next_run


def _advise_scale(run: LocalJob, nodes: str, _: Change) -> tuple[str, str]:
    again = run.next_run_with("--nodes", nodes, fresh=run.is_done)
    if run.active:
        return f"suspend it, then type `{again}`", run.kdist("suspend")
    if run.is_done:
        return "it is done; --fresh archives it and starts at step 0", again
    return "it continues on as many nodes as `kdist run` is given", again


def _advise_exec(_: LocalJob, argv: Sequence[str], **__: object) -> tuple[str, str]:
    return "its ranks are processes of this machine; run the command here", shlex.join(argv)


def _advise_forward(run: LocalJob, *_: object, **__: object) -> tuple[str, str]:
    ports = agents.ports(run.root) if run.active else {}
    if not ports:
        return "it has no agents that listen now", run.kdist("status")
    url = f"http://127.0.0.1:{min(ports.items())[1]}/status"
    return "its agents listen on this machine", f"curl {url}"


@dataclass(frozen=True)
class LocalJob:
    """One run folder. Its files are read at each access, since an active run writes them.

    Attributes:
        root: the run folder, or a checkpoint folder that was copied without one.
        dialog: receives messages about progress.
        run_id: that of the only run that is meant; empty for whichever has the folder.
    """

    root: Path
    dialog: Dialog = SILENT
    run_id: str = ""

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def namespace(self) -> str:
        return ""

    @property
    def no_events(self) -> str:
        return f"there are no such events in the logs of {self.name}"

    @property
    def location(self) -> run_dir.CheckpointLocation:
        """Where its checkpoints are."""
        return run_dir.location_of(self.root)

    @property
    def run(self) -> Mapping[str, Any]:
        """The content of `run.json`; empty if there is none."""
        return run_dir.read_json(self.root / "run.json") or {}

    @property
    def is_run_folder(self) -> bool:
        """Whether this is a run folder, so not only a folder of checkpoints."""
        return (self.root / "run.json").is_file()

    @property
    def exists(self) -> bool:
        """Whether there is such a run, or a folder of checkpoints."""
        if self.run_id and self.run.get("run_id", self.run_id) != self.run_id:
            return False
        kept = (self.root / LEDGER).is_dir() or any(self.root.glob(f"{CHECKPOINT}*"))
        return self.is_run_folder or kept or self.active  # an active one begins again

    @property
    def is_archived(self) -> bool:
        """Whether a run that started from scratch has taken its name, which has no dot."""
        return self.is_run_folder and "." in self.name

    def pin(self) -> LocalJob:
        """The run that has the folder now, and no later one."""
        return replace(self, run_id=str(self.run.get("run_id", "")))

    def follow(self) -> LocalJob:
        """The run where it is now, which may be its archive. Raises `NotFoundError`."""
        siblings = self.root.parent.glob("*.*") if self.run_id else ()
        archives = (each for each in siblings if each.name.startswith(f"{self.name}."))
        for root in (*archives, self.root):
            found = replace(self, root=root)
            if found.exists and (root == self.root or found.run.get("run_id") == self.run_id):
                return found
        if self.is_run_folder:
            what = f"run {self.run_id} of {self.name} was deleted, and a later one has its name"
            raise NotFoundError(what, next_command="kdist get --local")
        from kdist.job.find import missing_run

        raise missing_run(str(self.root))

    @property
    def active(self) -> bool:
        """Whether its `kdist run` is running."""
        return agents.is_active(self.root)

    @property
    def is_done(self) -> bool:
        """Whether its training has reached its end."""
        return not self.active and self.last_invocation.get("outcome") == "done"

    @property
    def pid(self) -> int | None:
        """Process id of the active `kdist run`; None if none is active."""
        if not self.active:
            return None
        try:
            return int((self.root / "lock").read_text())
        except (OSError, ValueError):
            return None

    @property
    def last_invocation(self) -> Mapping[str, Any]:
        """What `run.json` says of the last `kdist run`; empty if there was none."""
        found = list(documents.items(self.run, "invocations"))
        return found[-1] if found else {}

    @property
    def command(self) -> tuple[str, ...] | None:
        """Arguments of `kdist` that start it again; None if the job came from standard input, or
        the run was started by a version that did not record them.
        """
        found = self.last_invocation.get("command")
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            return None
        return tuple(found) or None

    @property
    def folder_of_command(self) -> Path:
        """Working directory of the recorded command."""
        found = self.last_invocation.get("cwd")
        return Path(found) if isinstance(found, str) else Path.cwd()

    @property
    def next_run(self) -> str:
        """The command line that continues the run, valid where its relative paths are."""
        return self.next_run_with()

    @property
    def next_resume(self) -> str:
        """The command line that resumes the run in the background, or else `next_run`."""
        return self.kdist("resume") if self.command else self.next_run

    def next_run_with(self, option: str = "", value: str = "", *, fresh: bool = False) -> str:
        """`next_run` with this option of `kdist run`, instead of an earlier value of it; with
        `fresh` it starts again at step 0.
        """
        added = [*(["--fresh"] if fresh else []), *(each for each in (option, value) if each)]
        if self.command is None:
            return shlex.join(["kdist", "run", *added, "JOB.yaml"])
        verb, *rest = self.command
        kept: list[str] = []
        while rest and rest[0].startswith("-"):
            length = 2 if rest[0] in _WITH_VALUE else 1
            kept += rest[:length] if rest[0] != option else []
            del rest[:length]
        folder = self.folder_of_command
        there = "" if folder == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
        return f"{there}kdist {shlex.join([verb, *added, *kept, *rest])}"

    @cached_property
    def reference(self) -> str:
        """The words by which another command names this run from the working directory."""
        if self.root.parent == run_dir.home():
            return self.name
        shown = os.path.relpath(self.root)
        return shown if os.sep in shown else f".{os.sep}{shown}"

    @property
    def here(self) -> str:
        """That it is not on a cluster."""
        return f"{self.name} is a run on this machine"

    def kdist(self, verb: str, *options: str) -> str:
        """The command line `kdist VERB` for this run."""
        return " ".join(["kdist", verb, shlex.quote(self.reference), *options])

    @property
    def grace_seconds(self) -> float:
        """Seconds that its ranks may take to save and end."""
        train = run_dir.read_json(self.root / "train.json") or {}
        default: int = TrainConfig.model_fields["termination_grace_period_seconds"].default
        return documents.number(train, "terminationGracePeriodSeconds") or default

    def refuse(self, verb: str, hint: str, command: str) -> UsageError:
        """The error of `kdist VERB`, which is for jobs on a cluster: what to do here instead, in
        words and as a command.
        """
        return UsageError(
            f"{self.here}, and `kdist {verb}` is for jobs on a cluster",
            hint=hint,
            next_command=command,
        )

    def snapshot(self) -> RunSnapshot:
        from kdist.job.local.status import RunSnapshot

        return RunSnapshot(self.name, run=self)

    def watch(self) -> Iterator[tuple[Snapshot, Diagnosis]]:
        active = True
        while active:
            active = self.active
            yield self.why()
            if active:
                time.sleep(_WATCH_SECONDS)

    def why(self) -> tuple[Snapshot, Diagnosis]:
        from kdist.job.local.status import diagnose_run

        seen = self.snapshot()
        return seen, diagnose_run(seen)

    def events(self, types: set[str], *, follow: bool) -> Iterator[Sequence[Mapping[str, Any]]]:
        from kdist.job.local.logs import read_events, to_document

        found = map(to_document, read_events(self, follow=follow, types=types))
        yield from ([each] for each in found) if follow else [list(found)]

    def logs(self, chosen: LogSelection) -> Iterator[Entry | JobStatus]:
        from kdist.job.local import trainer_tools
        from kdist.job.local.logs import read_entries

        if chosen.generation is not None:
            with TemporaryDirectory() as folder:
                files = trainer_tools.fetch_kept_logs(
                    self.name, self.location, Path(folder), generation=chosen.generation
                )
                yield from chosen.select(read_files(files, tail=chosen.tail))
            return
        if chosen.previous:
            raise UsageError(
                f"{self.here}: its logs include those of earlier instances",
                next_command=self.kdist("logs"),
            )
        status = self.snapshot().status if chosen.rank == FAILED else None
        end = float("inf") if chosen.timeout is None else time.monotonic() + chosen.timeout
        entries = read_entries(
            self,
            until=end,
            follow=chosen.follow,
            since=chosen.since,
            tail=chosen.tail,
            node=chosen.container,
        )
        yield from chosen.select(entries, status)
        if chosen.follow:
            now = self.snapshot().status
            if self.active and time.monotonic() >= end:
                raise self._timeout_error(now, "done", chosen.timeout)
            yield now

    def wait(self, goal: str, *, timeout: float | None) -> JobStatus | None:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        reported = ""
        while self.exists:
            active = self.active
            status = self.snapshot().status
            if GOALS[goal](status):
                return status
            if (line := describe_status(status)) != reported:
                self.dialog.notify(line)
                reported = line
            if not active and goal != "deleted":
                raise end_error(
                    status, goal, explain=lambda: self.why()[1], command=self.kdist("why")
                )
            if time.monotonic() >= end:
                raise self._timeout_error(status, goal, timeout)
            time.sleep(_WATCH_SECONDS)
        if goal != "deleted":
            return self.follow().wait(goal, timeout=max(0.0, end - time.monotonic()))
        return None

    def _timeout_error(self, status: JobStatus, goal: str, timeout: float | None) -> KdistError:
        cause = self.why()[1]
        return timeout_error(status, goal, timeout or 0.0, cause=cause, command=self.kdist("why"))

    def samples(self) -> Mapping[str, AgentSample]:
        return agents.fetch_samples(self.root, metrics=True)

    def explain_silence(self) -> KdistError:
        what = f"no agent of {self.name} answers"
        return KdistError(what, next_command=self.kdist("status"))

    def suspend(self, how: Change) -> str:
        pid = self.pid
        if pid is None:
            status = self.snapshot().status
            if status.phase is Phase.SUSPENDED:
                return f"{self.name} is already suspended: {status.message}"
            raise KdistError(
                f"{self.name} is not running ({status.phase}) {CANNOT_SUSPEND}",
                next_command=self.kdist("status"),
            )
        if how.dry_run != "none":
            return f"{self.name} would be suspended ({how.dry_run} dry run)"
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError as error:
            raise KdistError(f"process {pid} of {self.name}: {error.strerror}") from error
        if not how.wait:
            return f"{self.name} is being suspended; it saves and ends"
        self.dialog.notify(f"waiting for {self.name} (pid {pid}) to save and end")
        limit = self.grace_seconds + _SPARE_SECONDS if how.timeout is None else how.timeout
        end = time.monotonic() + limit
        while self.active:
            if time.monotonic() >= end:
                raise KdistError(
                    f"{self.name} has not ended within {limit:.0f} s",
                    next_command=self.kdist("status"),
                    code=Code.TIMEOUT,
                )
            time.sleep(_POLL_SECONDS)
        status = self.snapshot().status
        if status.phase is not Phase.SUSPENDED:
            was = f"was not suspended: {status.phase}"
            was = "has ended" if status.phase is Phase.STOPPED else was
            raise KdistError(
                f"{self.name} {was}: {status.message}".rstrip(": "),
                next_command=self.kdist("status"),
            )
        saved = status.last_checkpoint_step
        then = describe_continuation(saved)
        message = f"{self.name} is suspended: {status.message}"
        return Changed(message, self.next_resume, then, saved=saved)

    def resume(self, how: Change) -> str:
        from kdist.job.local.launch import launch_detached

        status = self.snapshot().status
        if self.active:
            return f"{self.name} {NOT_SUSPENDED}"
        if self.is_archived:
            first = self.root.with_name(self.name.partition(".")[0])
            raise KdistError(
                f"{self.name} is archived and cannot be resumed: a later run has its name",
                hint="its logs, report and checkpoints can be read; it could only continue as "
                f"{first}: rename the run that is there now, then {self.root}",
                next_command=self.kdist("status"),
            )
        if status.phase is Phase.SUCCEEDED:
            raise KdistError(
                f"{self.name} is done and cannot be resumed",
                hint="--fresh archives it and starts at step 0",
                next_command=self.next_run_with(fresh=True),
            )
        if self.command is None:
            raise KdistError(
                f"the command that started {self.name} is not recorded",
                hint="the `kdist run` that you started it with continues it",
            )
        if how.dry_run != "none":
            return f"{self.name} would be resumed ({how.dry_run} dry run)"
        launched = launch_detached(self.command, self.folder_of_command)
        if not launched.begun:
            self.dialog.notify(launched.output.rstrip())
            raise KdistError(
                f"{self.name} was not resumed: `{self.next_run}` ended at once"
            ) from launched.error
        return f"{self.name} runs again (pid {launched.pid}); its output is in {launched.log}"

    def plan_deletion(self, chosen: DeleteOptions) -> Deletion:
        if self.active and (not chosen.wait or chosen.grace_period is not None):
            raise UsageError(
                f"{self.name} is running, and its folder can only be deleted after it has saved "
                "and ended: --no-wait and --grace-period are for jobs on a cluster",
                next_command=self.kdist("suspend"),
            )
        own = self.root / _CHECKPOINTS
        if not self.is_run_folder and self.root.parent != run_dir.home():
            raise KdistError(
                f"{self.root} holds checkpoints, but no run; kdist does not delete such a folder"
            )
        used = run_dir.folder_of(self.root) if self.is_run_folder else own
        is_inside = used.is_relative_to(self.root)
        if (chosen.purge and is_inside) or not used.is_dir():
            return Deletion(self._delete(chosen))
        command = self.kdist("delete", "--purge", "--local") if is_inside else ""
        return Deletion(self._delete(chosen), [describe_kept(str(used), command)])

    def _delete(self, chosen: DeleteOptions) -> Iterator[str]:
        """Suspend the run if it is active, then delete it."""
        if chosen.dry_run == "none":
            if self.active:
                self.suspend(Change(timeout=chosen.timeout))
            run_dir.delete(self.root, keep=() if chosen.purge else (_CHECKPOINTS,))
        yield f"run {self.root}"

    def checkpoints(self, action: str, *arguments: str) -> dict[str, Any]:
        from kdist.job.local import trainer_tools

        return trainer_tools.run_checkpoint_tool(self.location, action, *arguments)

    def export_weights(self, file: Path, *arguments: str) -> dict[str, Any]:
        from kdist.job.local import trainer_tools

        return trainer_tools.export(self.location, file, *arguments)

    restart = _refuses("restart", _advise_restart)
    scale = _refuses("scale", _advise_scale)
    exec = _refuses("exec", _advise_exec)
    forward = _refuses("port-forward", _advise_forward)


def find_job(name: str, *, remains: bool = False, dialog: Dialog = SILENT) -> LocalJob | None:
    """The run NAME, which is the name of a job in `.kdist` (or `$KDIST_HOME`), or the path to a run
    folder or a checkpoint folder; with `remains` also a deleted run whose checkpoints have stayed.
    None if there is none.
    """
    root = Path(name).absolute() if os.sep in name else run_dir.home() / name
    found = LocalJob(root, dialog)
    with suppress(OSError, ValueError):  # a name that no file can have
        exists = found.exists if os.sep in name else found.is_run_folder
        if exists or (remains and (root / _CHECKPOINTS).is_dir()):
            return found
    return None


def list_jobs(*, dialog: Dialog = SILENT) -> list[LocalJob]:
    """All runs of `.kdist` (or `$KDIST_HOME`), by name."""
    try:
        folders = sorted(run_dir.home().iterdir())
    except OSError:
        return []
    return [LocalJob(folder, dialog) for folder in folders if (folder / "run.json").is_file()]
