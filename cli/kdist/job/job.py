"""`Job`: what can be done with a job, wherever it runs. `kdist.job.find` finds one.

A method that needs more than a request reports its progress to the `Dialog` that the job was found
with. All raise `JobNotFoundError` if the job does not exist by then, and `KdistError` with code
UNREACHABLE if the API server does not answer. What a job on this machine has no use for raises
`UsageError`, which says what does the same there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from kdist.errors import KdistError, UsageError

if TYPE_CHECKING:
    from kdist.agents.metrics import AgentSample
    from kdist.diagnose import Diagnosis
    from kdist.events import Entry
    from kdist.job.cluster.logs import PodLine
    from kdist.status import JobStatus, Snapshot

    LogLine: TypeAlias = PodLine | Entry

FAILED = "failed"
"""Stands for the rank whose failure ended a job."""
NOT_SUSPENDED = "is not suspended"
CANNOT_SUSPEND = "and cannot be suspended"
"""What is said of a job after its name and its state."""
Notify = Callable[[str], None]
"""Receives a message about progress."""


def reject(what: str, lines: Sequence[str]) -> NoReturn:  # noqa: ARG001 - `Dialog.approve`
    """Send nothing that nobody has looked at."""
    raise KdistError(what, hint="`kdist apply` with the job file sends what the file says")


def refuse(what: str, _: str) -> NoReturn:
    """Archive nothing without a yes."""
    raise KdistError(f"{what}, which nobody has confirmed")


@dataclass(frozen=True)
class Dialog:
    """What operations say and ask meanwhile.

    Attributes:
        notify: receives messages about progress.
        warn: receives warnings.
        approve: asks about objects that a job's ConfigMap describes and nothing in the cluster
            confirms: a sentence, and the lines that show them. Raises `KdistError` for a no.
        confirm: asks before a run is archived: a sentence, and the question. Raises for a no.
        note_absence: receives the sentence that the job is not on this machine either, before a
            cluster is asked for it.
    """

    notify: Notify = lambda _: None
    warn: Callable[[str], None] = lambda _: None
    approve: Callable[[str, Sequence[str]], None] = reject
    confirm: Callable[[str, str], None] = refuse
    note_absence: Callable[[str], None] = lambda _: None


SILENT = Dialog()
"""Says nothing, sends nothing that only a job's ConfigMap vouches for, and agrees to nothing."""


@dataclass(frozen=True)
class Change:
    """How a job is changed.

    Attributes:
        wait: wait until the change has taken effect.
        timeout: seconds to wait; None for a time that depends on the change.
        dry_run: `none`; `client` only returns what would be done; `server` has the server check it.
    """

    wait: bool = True
    timeout: float | None = None
    dry_run: str = "none"


class Changed(str):
    """What a change has come to, in a sentence, and what of it a program reads: the sentence
    without the command, the command to run next, and the step that is saved, if that is known.
    """

    def __new__(
        cls, message: str, next_command: str, then: str = "", *, saved: int | None = None
    ) -> Changed:
        """`then` is what the command does."""
        text = f"{message}. Next: {next_command}" + (f"   {then}" if then else "")
        changed = super().__new__(cls, text)
        changed.document = {"message": message, "nextCommand": next_command, "savedStep": saved}
        return changed

    document: Mapping[str, Any]


@dataclass(frozen=True)
class LogSelection:
    """Which lines of a job's logs to read.

    Attributes:
        follow: go on through restarts and replaced pods until the job ends.
        rank: only these ranks, such as `0-3,7`, or `failed` for the one whose failure ended the
            job; None for all.
        pod: only the pod, or the agent here, of this name or index; None for all.
        container: only this container; None for the training's.
        previous: of the previous instance of the container.
        since: only the lines of the last seconds; None for all.
        tail: only the last lines of each pod; None for all.
        generation: the log of this generation that was kept next to the checkpoints; None for the
            one that is written now, or the last one if no pod is left.
        timeout: seconds after which following ends with an error; None for no limit.
    """

    follow: bool = False
    rank: str | None = None
    pod: str | None = None
    container: str | None = None
    previous: bool = False
    since: float | None = None
    tail: int | None = None
    generation: int | None = None
    timeout: float | None = None

    def find_ranks(self, status: JobStatus | None, *, why: str = "") -> set[int]:
        """The numbers of `rank`. Raises `UsageError` if no rank has failed, or `rank` has no
        numbers.

        Args:
            status: which tells the rank that has failed; None if that is not known.
            why: the next command if no rank has failed.
        """
        if self.rank == FAILED and status is not None:
            record = status.exit_record
            if record is None or record.rank is None:
                raise UsageError(f"no rank of {status.name} has failed", next_command=why)
            return {record.rank}
        found: set[int] = set()
        for part in (self.rank or "").split(","):
            match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise UsageError(
                    f"--rank takes numbers such as 0,2-5, or failed; found `{self.rank}`"
                )
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
        return found

    def describe_absence(self, name: str) -> str:
        """That the job of this name has no line of the chosen ranks."""
        return f"there is no line of rank {self.rank} in the logs of {name}"

    def select(self, entries: Iterable[Entry], status: JobStatus | None = None) -> Iterator[Entry]:
        """Yield the chosen ones of the entries of nodes' logs, by node and rank. `status` is as for
        `find_ranks`.
        """
        ranks = self.find_ranks(status) if self.rank else None
        for entry in entries:
            if self.pod and self.pod not in (entry.node, entry.node.rpartition("-")[2]):
                continue
            if ranks is None or entry.rank in ranks:
                yield entry


@dataclass(frozen=True)
class DeleteOptions:
    """How a job is deleted.

    Attributes:
        purge: delete its checkpoints too, except for those that kdist did not make a place for.
        orphans: delete too the pods that its label names and nothing owns.
        wait: wait for the pods to save and end.
        timeout: seconds to wait; None for their grace period and a margin.
        grace_period: of the pods in seconds, instead of the job's; None for that.
        dry_run: as in `Change`.
    """

    purge: bool = False
    orphans: bool = False
    wait: bool = True
    timeout: float | None = None
    grace_period: int | None = None
    dry_run: str = "none"


@dataclass(frozen=True)
class Deletion:
    """A deletion that has not begun.

    Attributes:
        steps: deletes what is the job's, and yields the title of each object as it goes. Raises
            `KdistError` if rights are missing (FORBIDDEN), or pods do not end in time (TIMEOUT).
        kept: sentences about what stays; complete after the last step.
    """

    steps: Iterator[str]
    kept: list[str] = field(default_factory=list)


def describe_kept(what: str, command: str) -> str:
    """That checkpoints stay, and what deletes them; without a command, nothing of kdist does."""
    deletes = f"`{command}` deletes it" if command else "kdist never deletes it"
    return f"{what} stays, with the checkpoints; {deletes}"


@dataclass(frozen=True)
class Forward:
    """A port of this machine, forwarded to a port of a pod."""

    local: int
    pod: str
    remote: int


class Job(Protocol):
    """A job."""

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str:
        """Its namespace; empty on this machine."""

    @property
    def no_events(self) -> str:
        """What to say if it has no events."""

    def snapshot(self) -> Snapshot:
        """All of it at one moment. Its `status` is what the job is doing; `gap` says what is
        missing from that.
        """

    def watch(self) -> Iterator[tuple[Snapshot, Diagnosis]]:
        """Yield snapshots, and why the job is in its state, until it has ended."""

    def why(self) -> tuple[Snapshot, Diagnosis]:
        """The root cause of its trouble."""

    def events(self, types: set[str], *, follow: bool) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield its events, oldest first: those that there are, then, with `follow`, new ones.
        `types` are the types to yield, in lower case; all if empty.
        """

    def logs(self, chosen: LogSelection) -> Iterator[LogLine | JobStatus]:
        """Yield lines of its logs; after the last line that was followed, the status in which it
        has ended. Raises `NotFoundError` if there is no log yet, `UsageError` for a rank or a
        container that it has not.
        """

    def wait(self, goal: str, *, timeout: float | None) -> JobStatus | None:
        """Wait until it reaches a goal, one of `goals.GOALS`, for `timeout` seconds, or for ever
        without one. Returns the status in which the job reached it; None if it is deleted. Raises
        `KdistError` if the job ended otherwise (JOB_FAILED, JOB_CANCELLED), or did not reach the
        goal in time (TIMEOUT).
        """

    def samples(self) -> Mapping[str, AgentSample]:
        """The status and the metrics of each agent that answers, by its pod."""

    def explain_silence(self) -> KdistError:
        """The error that says why no agent answers. Raises `KdistError` if the user has no right
        to reach one (FORBIDDEN).
        """

    def suspend(self, how: Change) -> str:
        """Save its state and stop it; returns the result in a sentence. Raises `KdistError` if it
        has finished, could not save, or does not end in time (TIMEOUT).
        """

    def resume(self, how: Change) -> str:
        """Start it again where `suspend` has stopped it; returns the result in a sentence. Raises
        `KdistError` if it has finished, or does not start in time (TIMEOUT).
        """

    def restart(self, how: Change, *, fresh: bool, confirmed: bool) -> str:
        """Restart all ranks; returns the result in a sentence. What has finished is made again.
        Raises `KdistError` if pods or objects do not end in time (TIMEOUT).

        Args:
            how: to do it.
            fresh: archive the checkpoints and start from scratch. Without it, a job that has
                succeeded has nothing left to do.
            confirmed: do not ask before a `fresh` start.
        """

    def scale(self, nodes: str, how: Change) -> str:
        """Change its number of nodes; returns the result in a sentence.

        Args:
            nodes: N or MIN:MAX. With one number an elastic job stays elastic: it keeps its min
                unless that is larger.
            how: to do it; it has taken effect when as many nodes train as may.

        Raises:
            UsageError: `nodes` is neither.
            KdistError: it has finished, cannot be scaled, or pods do not start or end in time
                (TIMEOUT).
        """

    def plan_deletion(self, chosen: DeleteOptions) -> Deletion:
        """How it would be deleted. Raises `UsageError` for options that do not apply to it."""

    def checkpoints(self, action: str, *arguments: str) -> dict[str, Any]:
        """What the trainer's checkpoint tool says: `list` or `verify`, and `--name CHECKPOINT`.
        Raises `KdistError` if the job has no checkpoints, or they cannot be read.
        """

    def export_weights(self, file: Path, *arguments: str) -> dict[str, Any]:
        """Write the weights of a checkpoint to a file, completely or not at all; returns a
        description of the file's content. `arguments` are `--step STEP` for another checkpoint than
        the newest, and `--ema` for averages. Raises `KdistError` if the weights cannot be read or
        written.
        """

    def exec(
        self,
        argv: Sequence[str],
        *,
        rank: int | None,
        pod: str,
        container: str | None,
        stdin: bool,
        tty: bool,
        out: Callable[[bytes], object] | None = None,
        err: Callable[[bytes], object] | None = None,
    ) -> int:
        """Run a command in a pod, and return its exit code.

        Args:
            argv: the command.
            rank: in the pod that runs this rank; rank 0 if neither this nor `pod` is given.
            pod: in the pod of this name.
            container: in this container; None for the training's.
            stdin: pass on standard input.
            tty: allocate a terminal.
            out: receives what it writes; None for the standard output of this process.
            err: likewise, for errors.
        """

    def forward(
        self, ports: Sequence[tuple[int, int]], *, rank: int | None, pod: str
    ) -> Iterator[Forward]:
        """Forward ports, each (local, remote) with 0 for a free local one, to a pod that is chosen
        as by `exec`, and yield each once it listens. When the pod is replaced, the same ports lead
        to its successor; it ends when the iterator is closed.
        """
