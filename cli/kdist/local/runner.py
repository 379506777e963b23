"""Runs a job on this machine: creates the run folder, starts the agents, follows their logs,
handles signals until all agents have ended, and writes the end report.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from kdist.errors import Code, KdistError
from kdist.events import Entry, EventFilter, LogTail, last_words
from kdist.local import run_dir as folders
from kdist.local.agents import StatusPoller
from kdist.local.launch import checkpoint_folder, list_devices, plan_agents, script_of
from kdist.local.progress import NodeProgress, Progress
from kdist.local.run_dir import RunFolder
from kdist.local.spawner import Spawner
from kdist.local.supervisor import AgentCommand, Interrupts, Outcome, ParentDeathPipe, Supervisor
from kdist.report.ledger import build_report, read_ledger
from kdist.spec import Exit, TrainingJob, judge_done

# seconds between two looks at logs and agents; a signal or the end of an agent shortens it
TICK = 0.25
FRAME = 0.5  # seconds between two drawings of the view: it shares the machine with the training
_WAITING_AGAIN = 30.0  # seconds after which a line off the terminal says the same once more


class Display(Protocol):
    """Where the session shows itself: a live view, or plain lines. It never waits for whoever looks
    at it.
    """

    def show(self, entry: Entry) -> None:
        """One line that stays."""

    def draw(self, progress: Progress) -> None:
        """The state of now, which replaces the one before."""


@dataclass
class RunSession:
    """What `run` needs. `stopped_by` is the signal that asked for the end, if one did."""

    commands: Sequence[AgentCommand]
    kubelet: Supervisor
    progress: Progress
    lifeline: ParentDeathPipe
    poller: StatusPoller
    narrator: EventFilter
    screen: Display
    stopped_by: signal.Signals | None = None
    _tails: dict[str, LogTail] = field(init=False)
    _waiting: tuple[str, float] = field(init=False, default=("", 0.0))
    _drawn_at: float = field(init=False, default=-FRAME)
    # the screen has gone: a closed terminal, a pipe that nobody reads
    _blind: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._tails = {
            command.node: LogTail(command.node, command.log) for command in self.commands
        }

    def run(self) -> Outcome:
        """Start the agents and see them to their end. Raises `OSError` when they cannot be
        started.
        """
        with Interrupts() as interrupts:
            try:
                self.poller.start()
                self.kubelet.start()
                while self.kubelet.poll():
                    self._obey(interrupts.received)
                    self._look()
                    interrupts.wait(
                        0 if any(tail.behind for tail in self._tails.values()) else TICK
                    )
                self._look(last=True)
            finally:
                self.poller.close()
                self.kubelet.close()
                self.lifeline.close()
        return self.kubelet.outcome

    def tell(self, node: str, event: str, /, **fields: object) -> None:
        """Take an event of kdist's own, in the form of the trainer's. What a node said before its
        agent ended comes first.
        """
        if event in ("agent-ended", "agent-restarting"):
            for entry in self._tails[node].read(last=True):
                self._take(entry)
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._take(Entry(node, {"time": stamp, "event": event, "level": "info", **fields}, ""))

    def _obey(self, received: list[signal.Signals]) -> None:
        while received:
            number = received.pop(0)
            if self.stopped_by is None:
                self.stopped_by = number
                self.tell(
                    "kdist",
                    "stopping",
                    reason=f"{number.name}; once more ends it now, without saving",
                )
                self.kubelet.stop()
            else:
                self.tell(
                    "kdist",
                    "force-stopping",
                    message=f"{number.name} again: ends now, without saving",
                )
                self.kubelet.kill()

    def _look(self, *, last: bool = False) -> None:
        read = [entry for tail in self._tails.values() for entry in _dated(tail.read(last=last))]
        # so that a cause is told before what follows from it elsewhere
        for _, entry in sorted(read, key=lambda dated: dated[0]):
            self._take(entry)
        for node, answer in self.poller.answers().items():
            self.progress.observe_answer(node, answer)
        self._tell_what_it_waits_for()
        now = self.progress.clock()
        if last or now - self._drawn_at >= FRAME:
            self._drawn_at = now
            self._show(lambda: self.screen.draw(self.progress))

    def _take(self, entry: Entry) -> None:
        if entry.event is not None:
            before = self.progress.step
            self.progress.observe(entry.node, entry.event)
            if self.progress.step > before or entry.event["event"] == "checkpoint-committed":
                self.kubelet.note_progress()
            if not self.narrator.is_news(entry.event):
                return
        else:
            self.progress.observe_print(entry)
        self._show(lambda: self.screen.show(entry))

    def _show(self, what: Callable[[], None]) -> None:
        """A training does not end because nobody can watch it any more."""
        if not self._blind:
            try:
                what()
            except OSError:
                self._blind = True

    def _tell_what_it_waits_for(self) -> None:
        sentence = self.progress.waiting_for()
        words = re.sub(r"no step for.*", "no step", sentence or "")
        said, at = self._waiting
        now = self.progress.clock()
        if words != said or (words and now - at > _WAITING_AGAIN):
            self._waiting = (words, now)
            if sentence:
                self.tell("kdist", "waiting", message=sentence)


def _dated(entries: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    """Each entry with its time, as text that sorts; what is printed counts with the event before
    it.
    """
    time = ""
    for entry in entries:
        time = str((entry.event or {}).get("time", time))
        yield time, entry


_LIVE_VIEW = "KDIST_LIVE_VIEW"  # agents then tell the states of progress bars as they come
REPORT_VERSION = "cli.kdist.dev/v1"


@dataclass(frozen=True)
class RunEnded:
    """How an invocation ended. `already` is true if the run had been done before and nothing was
    started.
    """

    outcome: Outcome
    report: Mapping[str, Any]
    stopped_by: signal.Signals | None = None
    already: bool = False

    @property
    def save_failed(self) -> bool:
        """Whether the job was asked to save and stop and could not save."""
        return self.outcome.kind == "stopped" and self.outcome.code == Exit.STORAGE


def run_job(
    job: TrainingJob, train_json: str, *, base: Path, fresh: bool, screen: Display, lines_only: bool
) -> RunEnded:
    """Run the job until it is done, has failed or was stopped.

    Args:
        job: the job.
        train_json: what the agents are told, as the rendered objects carry it.
        base: folder that relative paths start from, and working directory of the agents.
        fresh: put the old run aside instead of resuming it.
        screen: where to show what happens.
        lines_only: the screen draws no live view, so progress and waiting are told in lines.

    Raises `KdistError` for what keeps the job from starting.
    """
    checkpoints, script = checkpoint_folder(job, base), script_of(job, base)
    folder = RunFolder.open(job.metadata.name, fresh=fresh, checkpoints=checkpoints, script=script)
    try:
        done = folder.done()
        if done is not None and _is_over(job, done, train_json):
            return RunEnded(
                Outcome("done", 0), _report(job, folder, Outcome("done", 0)), already=True
            )
        devices = list_devices(os.environ)
        environment = dict(os.environ) if lines_only else {**os.environ, _LIVE_VIEW: "1"}
        commands = plan_agents(
            job, folder, base=base, environment=environment, devices=devices or None
        )
        folder.begin(train_json)
        outcome = Outcome("killed", 0)
        stopped_by = None
        session: RunSession | None = None
        spawner: Spawner | None = None
        lifeline = ParentDeathPipe(folder.lifeline)
        try:
            spawner = Spawner(folder, commands[0])
            session = _make_session(
                job, folder, spawner.serve(commands), lifeline, screen, lines_only
            )
            which = f"{job.metadata.name}, run {folder.run_id}, invocation {folder.invocation}"
            session.tell(
                "kdist",
                "run-started",
                message=f"{which}: {len(commands)} agents, all of it in {folder.root}",
            )
            for moved in folder.moved:
                session.tell("kdist", "run-archived", message=f"the old run is in {moved}")
            outcome = session.run()
            stopped_by = session.stopped_by
        finally:
            report = _note_end(job, folder, outcome, session)
            lifeline.close()
            if spawner is not None:
                spawner.close()
        return RunEnded(outcome, report, stopped_by)
    finally:
        folder.close()


def _note_end(
    job: TrainingJob, folder: RunFolder, outcome: Outcome, session: RunSession | None
) -> dict[str, Any]:
    """Leave the end report in the run folder; a disk that refuses it changes nothing about how the
    job ended.
    """
    try:
        folder.end(outcome.kind)
        report = _report(job, folder, outcome)
        folders.write_json(folder.root / "report.json", report)
    except OSError as error:
        report = _report(job, folder, outcome)
        if session is not None:
            message = f"the end report cannot be written to {folder.root}: {error.strerror}"
            session.tell("kdist", "report-not-kept", message=message)
    return report


def _is_over(job: TrainingJob, done: Mapping[str, Any], train_json: str) -> bool:
    """Whether what was done is what the job asks for; False where its end was moved further away.

    Raises `KdistError` where the job was edited in any other way: the old report would not be about
    it.
    """
    finished = judge_done(done, json.loads(train_json))
    if finished.problem is not None:
        hint = (
            "--fresh trains it anew and keeps the old run aside; more epochs or steps go on "
            "from its last checkpoint"
        )
        raise KdistError(
            f"{job.metadata.name}: {finished.problem}", hint=hint, code=Code.JOB_FAILED
        )
    return finished.is_over


def _make_session(
    job: TrainingJob,
    folder: RunFolder,
    commands: list[AgentCommand],
    lifeline: ParentDeathPipe,
    screen: Display,
    lines_only: bool,
) -> RunSession:
    spec = job.spec
    nodes = {command.node: NodeProgress(command.node) for command in commands}
    session: RunSession

    def tell(node: str, event: str, /, **fields: object) -> None:
        session.tell(node, event, **fields)

    session = RunSession(
        commands=commands,
        # The job's own budget is counted by the agents; this one is for agents that die before they
        # can count.
        kubelet=Supervisor(
            commands,
            grace_seconds=spec.termination_grace_period_seconds,
            backstop=spec.max_restarts + 5,
            tell=tell,
        ),
        progress=Progress(
            job.metadata.name, nodes, needed=spec.nodes.min, managed=spec.train is not None
        ),
        lifeline=lifeline,
        poller=StatusPoller({node: folder.node(node) for node in nodes}),
        narrator=EventFilter(lines_only=lines_only),
        screen=screen,
    )
    return session


def _report(job: TrainingJob, folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """The end report: how it ended, what the ledger tells, and where everything lies."""
    events, steps = read_ledger(folder.checkpoints)
    invocations = [(each["started"], each["ended"]) for each in folder.run["invocations"]]
    ledger = build_report(events, steps, invocations=invocations)
    ledger["metrics"] = (
        ledger["metrics"] or (folder.done() or {}).get("metrics") or {}
    )  # DONE is written before the ledger's line
    began, ended = invocations[-1] if invocations else (0.0, 0.0)
    return {
        "apiVersion": REPORT_VERSION,
        "kind": "RunReport",
        "job": job.metadata.name,
        "runId": folder.run_id,
        "outcome": outcome.kind,
        "trainerExitCode": outcome.code,
        "failure": _failure(folder, outcome),
        "invocation": folder.invocation,
        "wallSeconds": round((ended or began) - began, 3),
        **ledger,
        "folder": str(folder.root),
        "checkpointFolder": str(folder.checkpoints),
    }


def _failure(folder: RunFolder, outcome: Outcome) -> dict[str, Any] | None:
    """The exit record of the agent that decided, with the log to read on in; None if the job did
    not fail.
    """
    if outcome.kind != "failed" or outcome.node is None:
        return None
    log = folder.log(outcome.node)
    record = folders.read_json(folder.root / outcome.node / "exit.json") or {
        "message": last_words(log)
    }
    return {**record, "agent": outcome.node, "log": str(log)}
