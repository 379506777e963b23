"""Runs a job on this machine: creates the run folder, starts the agents, follows their logs and
handles signals until all agents have ended, and writes the end report.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from kdist.events import Entry, EventFilter, LogTail, with_time
from kdist.job.local.agents import StatusPoller, read_port
from kdist.job.local.end_report import RunEnded, make_report, read_saved_step, write_report
from kdist.job.local.fetching import FetchCommand, Fetches, plan_fetches
from kdist.job.local.interpreter import OWN, Interpreter
from kdist.job.local.launch import (
    LauncherLink,
    checkpoint_folder,
    list_devices,
    plan_agents,
    script_of,
)
from kdist.job.local.progress import NodeProgress, Progress
from kdist.job.local.run_dir import RunFolder, bucket_of, is_finished, location_of, record_move
from kdist.job.local.supervisor import (
    AgentCommand,
    Outcome,
    ParentDeathPipe,
    SignalQueue,
    Spawner,
    Supervisor,
)
from kdist.job.local.trainer_tools import archive_bucket, copy_records
from kdist.spec import TrainingJob
from kdist.units import count
from kdist_trainer.formats import LIVE_VIEW, SCRATCH

_POLL_INTERVAL = 0.25  # seconds; a signal or the exit of an agent shortens it
_FRAME_INTERVAL = 0.5  # seconds: the view shares the machine with the training
_REPEAT_WAITING = 30.0  # seconds after which an unchanged reason for waiting is logged again


class Display(Protocol):
    """Shows the run: as a live view, or as plain lines. It never blocks on its reader."""

    def show(self, entry: Entry) -> None:
        """Print an entry, which stays."""

    def draw(self, progress: Progress) -> None:
        """Draw the present state in place of the one before."""


@dataclass
class RunSession:
    """One invocation: the agents from start to exit.

    Attributes:
        commands: how to start each agent.
        supervisor: starts, restarts and stops the agents.
        progress: state of the job.
        parent_death_pipe: ends the agents when this process dies.
        poller: requests the agents' status.
        event_filter: selects the events to show.
        display: shows entries and progress.
        launcher: is told when all agents serve.
    """

    commands: Sequence[AgentCommand]
    supervisor: Supervisor
    progress: Progress
    parent_death_pipe: ParentDeathPipe
    poller: StatusPoller
    event_filter: EventFilter
    display: Display
    launcher: LauncherLink | None = None
    _serving: bool = field(init=False, default=False)
    _tails: dict[str, LogTail] = field(init=False)
    _last_waiting: tuple[str, float] = field(init=False, default=("", 0.0))
    _drawn_at: float = field(init=False, default=-_FRAME_INTERVAL)
    # Writing failed: the terminal is closed, or nobody reads the pipe.
    _display_lost: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._tails = {
            command.node: LogTail(command.node, command.log) for command in self.commands
        }

    def run(self, signals: SignalQueue) -> Outcome:
        """Start the agents and wait until all have ended; `signals` stop or kill them. Raises
        `OSError` if the agents cannot be started.
        """
        try:
            self.poller.start()
            self.supervisor.start()
            while self.supervisor.poll():
                saves = self.progress.saves
                for number, kills in signals.take():
                    if not kills:
                        reason = (
                            f"{number.name}; repeat it to exit now" + ", without saving" * saves
                        )
                        how = {} if saves else {"saves": False}
                        self.log_event("kdist", "stopping", reason=reason, **how)
                        self.supervisor.stop()
                    else:
                        message = f"{number.name} again: exits now" + ", without saving" * saves
                        self.log_event("kdist", "force-stopping", message=message)
                        self.supervisor.kill()
                self._poll()
                signals.wait(
                    0 if any(tail.behind for tail in self._tails.values()) else _POLL_INTERVAL
                )
            self._poll(last=True)
        finally:
            self.poller.close()
            self.supervisor.close()
            self.parent_death_pipe.close()
        return self.supervisor.outcome

    def log_event(self, node: str, event: str, /, **fields: object) -> None:
        """Log an event of kdist itself in the form of the trainer's events.

        When an agent has ended, the rest of its log comes first.
        """
        if event in ("agent-ended", "agent-restarting"):
            for entry in self._tails[node].read(last=True):
                self._handle(entry)
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._handle(Entry(node, {"time": stamp, "event": event, "level": "info", **fields}, ""))

    def _poll(self, *, last: bool = False) -> None:
        entries = [
            entry for tail in self._tails.values() for entry in with_time(tail.read(last=last))
        ]
        # A cause is shown before its effects on other nodes.
        for _, entry in sorted(entries, key=lambda timed: timed[0]):
            self._handle(entry)
        for node, reply in self.poller.replies().items():
            self.progress.observe_reply(node, reply)
        self._log_serving()
        sentence = self.progress.waiting_for()
        reason = re.sub(r"no step for.*", "no step", sentence or "")
        last_reason, logged_at = self._last_waiting
        now = self.progress.clock()
        if reason != last_reason or (reason and now - logged_at > _REPEAT_WAITING):
            self._last_waiting = (reason, now)
            if sentence:
                self.log_event("kdist", "waiting", message=sentence)
        self._draw(last=last)

    def _draw(self, *, last: bool = False) -> None:
        now = self.progress.clock()
        if last or now - self._drawn_at >= _FRAME_INTERVAL:
            self._drawn_at = now
            self._show(lambda: self.display.draw(self.progress))

    def fetch(self, commands: Sequence[FetchCommand], signals: SignalQueue) -> Outcome | None:
        """Fetch what the job names by URL, before `run`. Returns None if everything is there, else
        how the invocation ends. Raises `OSError` if a process cannot be started.
        """
        if commands and self.launcher is not None:
            self.launcher.report_begun(self.progress.job)
        agent = self.commands[0]
        environment = {name: each for name, each in agent.environment.items() if name != SCRATCH}
        fetches = Fetches(
            commands, environment, agent.directory, self._handle, self._draw, self.log_event
        )
        return fetches.run(signals)

    def _handle(self, entry: Entry) -> None:
        if entry.event is not None:
            before = self.progress.step
            self.progress.observe_event(entry.node, entry.event)
            if self.progress.step > before or entry.event["event"] == "checkpoint-committed":
                self.supervisor.record_progress()
            if not self.event_filter.should_show(entry.event):
                return
        else:
            self.progress.observe_print(entry)
        self._show(lambda: self.display.show(entry))

    def _show(self, show: Callable[[], None]) -> None:
        """Call the display, until it fails once: a training outlives its terminal."""
        if not self._display_lost:
            try:
                show()
            except OSError:
                self._display_lost = True

    def _log_serving(self) -> None:
        """Log the addresses of the agents' metrics once all of them serve."""
        if self._serving:
            return
        ports = [read_port(command.log.parent) for command in self.commands]
        if all(port is not None for port in ports):
            self._serving = True
            addresses = " ".join(f"http://127.0.0.1:{port}/metrics" for port in ports)
            self.log_event("kdist", "metrics-served", message=addresses)
            if self.launcher is not None:
                self.launcher.report_begun(self.progress.job)


def run_job(
    job: TrainingJob,
    train_json: str,
    *,
    base: Path,
    fresh: bool,
    display: Display,
    lines_only: bool,
    command: Sequence[str] = (),
    launcher: LauncherLink | None = None,
    warnings: Sequence[str] = (),
    python: Interpreter = OWN,
) -> RunEnded:
    """Run the job until it is done, has failed or was stopped. Raises `KdistError` if the job
    cannot be started.

    Args:
        job: the job.
        train_json: configuration of the agents, as the rendered objects carry it.
        base: folder that relative paths start from, and working directory of the agents.
        fresh: archive the previous run instead of resuming it.
        display: shows what happens.
        lines_only: whether the display has no live view, so that progress and waiting are shown
            as lines.
        command: the arguments after `kdist` that continue this run.
        launcher: the process that waits until a detached run has begun; None for any other run.
        warnings: what the end report says besides its results.
        python: what runs agents and ranks.
    """
    bucket = bucket_of(job)
    folder = RunFolder.open(
        job.metadata.name,
        fresh=fresh,
        checkpoints=checkpoint_folder(job, base),
        bucket=bucket and bucket.to_json(),
        script=script_of(job, base),
    )
    folder.warnings += warnings
    try:
        if bucket is not None:
            if fresh:
                folder.moved_bucket = archive_bucket(bucket)
                if folder.moved_bucket and folder.moved and location_of(folder.moved[-1]) == bucket:
                    there = bucket._replace(text=folder.moved_bucket)
                    record_move(folder.moved[-1], bucket=there.to_json())
            copy_records(bucket, folder.checkpoints)
        done = folder.done()
        if done is not None and is_finished(job, done, train_json, edited=folder.edited):
            return RunEnded(
                Outcome("done", 0),
                make_report(job.metadata.name, folder, Outcome("done", 0)),
                already=True,
            )
        devices = list_devices(os.environ)
        environment = {**os.environ, **python.variables(folder.root, os.environ)}
        commands = plan_agents(
            job,
            folder,
            base=base,
            environment=environment if lines_only else {**environment, LIVE_VIEW: "1"},
            devices=devices or None,
            python=python.path,
        )
        folder.begin(train_json, command=command)
        if launcher is not None:
            launcher.move_log(folder.root)
        with SignalQueue() as signals:  # until the report is written, also with a second Ctrl-C
            return _run_agents(
                job, folder, commands, display, signals, lines_only=lines_only, launcher=launcher
            )
    finally:
        folder.close()


def _run_agents(
    job: TrainingJob,
    folder: RunFolder,
    commands: list[AgentCommand],
    display: Display,
    signals: SignalQueue,
    *,
    lines_only: bool,
    launcher: LauncherLink | None,
) -> RunEnded:
    outcome = Outcome("killed", 0)
    session: RunSession | None = None
    spawner: Spawner | None = None
    pipe = ParentDeathPipe(folder.parent_pipe)
    try:
        spawner = Spawner(folder, commands[0])
        session = _make_session(
            job, folder, spawner.serve(commands), pipe, display, lines_only=lines_only
        )
        run = f"{job.metadata.name}, run {folder.run_id}, invocation {folder.invocation}"
        session.log_event(
            "kdist",
            "run-started",
            message=f"{run}: {count(len(commands), 'agent')}, all files in {folder.root}",
        )
        for moved in filter(None, [*folder.moved, folder.moved_bucket]):
            session.log_event("kdist", "run-archived", message=f"the previous run is in {moved}")
        session.launcher = launcher
        outcome = session.fetch(plan_fetches(job, folder), signals) or session.run(signals)
    except OSError as error:
        raise folder.explain(error) from error
    finally:
        report = write_report(
            job.metadata.name, folder, outcome, log_event=session.log_event if session else None
        )
        pipe.close()
        if spawner is not None:
            spawner.close()
    return RunEnded(outcome, report, signals.stopped_by)


def _make_session(
    job: TrainingJob,
    folder: RunFolder,
    commands: list[AgentCommand],
    pipe: ParentDeathPipe,
    display: Display,
    *,
    lines_only: bool,
) -> RunSession:
    spec = job.spec
    nodes = {command.node: NodeProgress(command.node) for command in commands}
    saved_step, saved_at = read_saved_step(folder.checkpoints)
    session: RunSession

    def log_event(node: str, event: str, /, **fields: object) -> None:
        session.log_event(node, event, **fields)

    session = RunSession(
        commands=commands,
        # The agents count the job's own restarts; this limit is for agents that die before they can
        # count.
        supervisor=Supervisor(
            commands,
            grace_seconds=spec.termination_grace_period_seconds,
            max_restarts=job.restart_limit + 5,
            on_event=log_event,
        ),
        progress=Progress(
            job.metadata.name,
            nodes,
            min_nodes=spec.nodes.min,
            managed=spec.train is not None,
            step=saved_step or 0,
            saved_step=saved_step,
            saved_at=saved_at,
        ),
        parent_death_pipe=pipe,
        poller=StatusPoller({node: folder.node(node) for node in nodes}),
        event_filter=EventFilter(lines_only=lines_only),
        display=display,
    )
    return session
