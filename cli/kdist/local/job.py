"""Runs a whole job on this machine: folder, agents, session, and at the end the report."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist.errors import Code, KdistError
from kdist.local import folder as folders
from kdist.local.folder import RunFolder
from kdist.local.follow import last_words
from kdist.local.kubelet import AgentCommand, Kubelet, Outcome
from kdist.local.launch import checkpoint_folder, list_devices, plan_agents, script_of
from kdist.local.lifeline import Lifeline
from kdist.local.narrate import Narrator
from kdist.local.poll import StatusPoller
from kdist.local.progress import Node, Progress
from kdist.local.session import Screen, Session
from kdist.local.spawner import Spawner
from kdist.report.ledger import build_report, read_ledger
from kdist.spec import Exit, TrainingJob, judge_done

_LIVE_VIEW = "KDIST_LIVE_VIEW"  # agents then tell the states of progress bars as they come
REPORT_VERSION = "cli.kdist.dev/v1"


@dataclass(frozen=True)
class Ended:
    """How an invocation ended. `already` is true if the run had been done before and nothing was started."""

    outcome: Outcome
    report: Mapping[str, Any]
    stopped_by: signal.Signals | None = None
    already: bool = False

    @property
    def save_failed(self) -> bool:
        """Whether the job was asked to save and stop and could not save."""
        return self.outcome.kind == "stopped" and self.outcome.code == Exit.STORAGE


def run_job(job: TrainingJob, train_json: str, *, base: Path, fresh: bool, screen: Screen, lines_only: bool) -> Ended:
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
            return Ended(Outcome("done", 0), _report(job, folder, Outcome("done", 0)), already=True)
        devices = list_devices(os.environ)
        environment = dict(os.environ) if lines_only else {**os.environ, _LIVE_VIEW: "1"}
        commands = plan_agents(job, folder, base=base, environment=environment, devices=devices or None)
        folder.begin(train_json)
        outcome = Outcome("killed", 0)
        stopped_by = None
        session: Session | None = None
        spawner: Spawner | None = None
        lifeline = Lifeline(folder.lifeline)
        try:
            spawner = Spawner(folder, commands[0])
            session = _make_session(job, folder, spawner.serve(commands), lifeline, screen, lines_only)
            which = f"{job.metadata.name}, run {folder.run_id}, invocation {folder.invocation}"
            session.tell("kdist", "run-started", message=f"{which}: {len(commands)} agents, all of it in {folder.root}")
            for moved in folder.moved:
                session.tell("kdist", "moved-aside", message=f"the old run is in {moved}")
            outcome = session.run()
            stopped_by = session.stopped_by
        finally:
            report = _note_end(job, folder, outcome, session)
            lifeline.close()
            if spawner is not None:
                spawner.close()
        return Ended(outcome, report, stopped_by)
    finally:
        folder.close()


def _note_end(job: TrainingJob, folder: RunFolder, outcome: Outcome, session: Session | None) -> dict[str, Any]:
    """Leave the end report in the run folder; a disk that refuses it changes nothing about how the job ended."""
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

    Raises `KdistError` where the job was edited in any other way: the old report would not be about it.
    """
    finished = judge_done(done, json.loads(train_json))
    if finished.problem is not None:
        hint = "--fresh trains it anew and keeps the old run aside; more epochs or steps go on from its last checkpoint"
        raise KdistError(f"{job.metadata.name}: {finished.problem}", hint=hint, code=Code.JOB_FAILED)
    return finished.is_over


def _make_session(
    job: TrainingJob, folder: RunFolder, commands: list[AgentCommand], lifeline: Lifeline, screen: Screen, lines_only: bool
) -> Session:
    spec = job.spec
    nodes = {command.node: Node(command.node) for command in commands}
    session: Session

    def tell(node: str, event: str, /, **fields: object) -> None:
        session.tell(node, event, **fields)

    session = Session(
        commands=commands,
        # The job's own budget is counted by the agents; this one is for agents that die before they can count.
        kubelet=Kubelet(commands, grace_seconds=spec.grace_seconds, backstop=spec.max_restarts + 5, tell=tell),
        progress=Progress(job.metadata.name, nodes, needed=spec.nodes.min, managed=spec.train is not None),
        lifeline=lifeline,
        poller=StatusPoller({node: folder.node(node) for node in nodes}),
        narrator=Narrator(lines_only=lines_only),
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
    """The exit record of the agent that decided, with the log to read on in; None if the job did not fail."""
    if outcome.kind != "failed" or outcome.node is None:
        return None
    log = folder.log(outcome.node)
    record = folders.read_json(folder.root / outcome.node / "exit.json") or {"message": last_words(log)}
    return {**record, "agent": outcome.node, "log": str(log)}
