"""The status of a run on this machine, in the words of a job on a cluster: each agent counts as a
pod, its scratch folder `node-0` as the pod's name. With it why a run is in its state: the rules of
`kdist.diagnose` for what its agents report, and how it ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kdist.diagnose import Diagnosis, diagnose
from kdist.diagnose.rule import DiagnosticContext, name_cause
from kdist.events import parse
from kdist.job.local import agents, run_dir
from kdist.job.local.end_report import describe_next, describe_unsaved
from kdist.job.local.fetching import read_fetch
from kdist.job.local.job import LocalJob, list_jobs
from kdist.job.local.run_dir import folder_of
from kdist.ledger import build_report, read_ledger
from kdist.spec import Exit
from kdist.status import (
    AgentStatus,
    ExitRecord,
    JobStatus,
    Nodes,
    NonfiniteLoss,
    Phase,
    Pod,
    Snapshot,
    documents,
)
from kdist.status.agent_status import (
    JOINING_STATES,
    STANDBY_STATE,
    newest_generation,
    read_machine_faults,
    read_training,
)
from kdist.status.job_status import JOINED, LOADS, decide_by_states
from kdist.status.pods import DONE
from kdist_trainer.formats import checkpoint_name

BACKEND = "local"
_TAIL = 1 << 16  # bytes of a log in which the last progress is looked for

Decision = tuple[Phase, str, str]


def read_status(job: LocalJob) -> JobStatus:
    """Read the status of a run: of an active one from its agents, else from its report."""
    now = time.time()
    run = job.run
    started = documents.number(job.last_invocation, "started")
    created = documents.number(run, "created") or started
    train = run_dir.read_json(job.root / "train.json") or {}
    least = documents.integer(train, "nodes", "min") or 1
    most = documents.integer(train, "nodes", "max") or least
    active = job.active
    samples = agents.fetch_samples(job.root) if active else {}
    asked = ((node, AgentStatus.read(node, dict(each.status))) for node, each in samples.items())
    reports = {node: report for node, report in asked if report is not None}
    pods = _pods(job.root, reports, started=started) if active else ()
    record = None if active else _find_record(job)
    has_group = any(report.generation for report in reports.values())
    past = {} if has_group else _read_past(job, active=active)
    if reports:
        restarts = max(report.restarts for report in reports.values())
        told = {**read_training(newest_generation(reports)), "restarts": restarts}
    else:
        target = documents.integer(_last_progress(job.root), "target")
        told = {"target_steps": target} if target else {}
    ended = len(list(job.root.glob("node-*/exit.json"))) if active else 0
    phase, reason, message = (
        _decide_active(_in_group(reports), most, ended=ended)
        if active
        else _decide_ended(job, past)
    )
    fetch = read_fetch(job.root, since=started or 0.0) if active and not reports else None
    if fetch is not None:
        phase, reason, message = Phase.STARTING, "Fetching", f"fetching {fetch[0]}"
        pods = ()
    common: dict[str, Any] = {
        "run_id": documents.text(run, "run_id"),
        "created": created,
        "age": None if created is None else max(0.0, now - created),
    }
    return JobStatus(
        name=job.name,
        namespace="",
        backend=BACKEND,
        phase=phase,
        reason=reason,
        message=message,
        nodes=Nodes(ready=len(_in_group(reports)), min=least, max=most),
        pods=tuple(pods),
        exit_record=record,
        location="local",
        fetch=fetch and fetch[1],
        **common,
        # an agent that is in no group yet knows nothing of what the run has come to
        **(told if has_group else {**told, **past}),
    )


def list_runs() -> list[JobStatus]:
    """The status of every run of `.kdist` (or `$KDIST_HOME`), by name."""
    return [read_status(job) for job in list_jobs()]


def _in_group(reports: Mapping[str, AgentStatus]) -> dict[str, AgentStatus]:
    """The reports without those of agents that stand by."""
    return {node: report for node, report in reports.items() if report.state != STANDBY_STATE}


def _pods(root: Path, reports: Mapping[str, AgentStatus], *, started: float | None) -> list[Pod]:
    host = os.uname().nodename
    found = []
    for index, scratch in enumerate(sorted(root.glob("node-*"))):
        answers = scratch.name in reports
        stands_by = answers and reports[scratch.name].state == STANDBY_STATE
        found.append(
            Pod(
                name=scratch.name,
                container="agent",
                index=index,
                node=host,
                phase="Running",
                state="Starting" if not answers else "Standby" if stands_by else "Running",
                ready=answers,
                running=answers,
                scheduled=True,
                started=started,
            )
        )
    return found


def _decide_active(reports: Mapping[str, AgentStatus], most: int, *, ended: int) -> Decision:
    """The phase of an active run, from the agents that answer and the number of those that have
    left an exit record.
    """
    states = [report.state for report in reports.values()]
    again = any(report.generation > 1 or report.restarts for report in reports.values())
    if (found := decide_by_states(states, len(states), most)) is not None:
        return found
    phase = Phase.RECOVERING if again else Phase.STARTING
    if "rendezvous" in states:
        words = f"{states.count('rendezvous')} of {most} nodes joined"
        return phase, "Rendezvous", words
    if any(state in JOINING_STATES for state in states):
        return phase, "Initializing", JOINED
    if states or ended >= most:
        return Phase.RUNNING, "Finishing", "the training has ended, its agents end"
    return phase, "Loading", LOADS


def _decide_ended(job: LocalJob, past: Mapping[str, Any]) -> Decision:
    """The phase of a run whose `kdist run` has ended, from its last invocation."""
    saved = past.get("last_checkpoint_step")
    kept = f"step {saved:,} is saved" if saved is not None else "nothing was saved"
    if not job.is_run_folder:
        return Phase.UNKNOWN, "OnlyCheckpoints", "a folder of checkpoints, without its run"
    outcome = job.last_invocation.get("outcome")
    if outcome == "done":
        return Phase.SUCCEEDED, "", ""
    if outcome == "failed":
        failure = documents.mapping(_read_report(job), "failure")
        cause = documents.text(failure, "cause")
        return Phase.FAILED, cause, documents.text(failure, "message")
    if outcome == "stopped":
        report = _read_report(job)
        missing = describe_unsaved(report)
        if documents.integer(report, "trainerExitCode") == Exit.STORAGE:
            return Phase.FAILED, "storage", f"it was stopped and could not save; {kept}{missing}"
        if missing:
            return Phase.STOPPED, "NotSaved", f"stopped, without saving; {kept}{missing}"
        return Phase.SUSPENDED, "", kept
    if outcome == "killed":
        kept += describe_unsaved(_read_report(job))
        return Phase.STOPPED, "Killed", f"ended at once, without saving; {kept}"
    if not job.last_invocation:
        return Phase.UNKNOWN, "NeverStarted", "`kdist run` never started its agents"
    return Phase.UNKNOWN, "Interrupted", f"its `kdist run` was killed; {kept}"


def _read_report(job: LocalJob) -> Mapping[str, Any]:
    """The end report, if it is of the last invocation; else empty."""
    report = run_dir.read_json(job.root / "report.json") or {}
    count = len(list(documents.items(job.run, "invocations")))
    of_run = report.get("runId") == job.run.get("run_id")
    return report if of_run and report.get("invocation") == count else {}


def _read_past(job: LocalJob, *, active: bool) -> dict[str, Any]:
    """What the end report says, or, for a run that has none, the ledger."""
    report = {} if active else dict(_read_report(job))
    checkpoints = folder_of(job.root)
    if not report:
        events, steps = read_ledger(checkpoints)
        began = [
            (each["started"], each.get("ended"))
            for each in documents.items(job.run, "invocations")
            if isinstance(each.get("started"), int | float)
        ]
        report = dict(build_report(events, steps, invocations=began)) if events and began else {}
    reached = documents.integer(report, "steps", "reached")
    committed = documents.integer(report, "steps", "committed")
    return {
        "step": reached or None,
        "loss": documents.number(report, "loss"),
        "restarts": documents.integer(report, "restarts", "total") or 0,
        "lost_steps": documents.integer(report, "steps", "lost") or 0,
        "last_checkpoint_step": committed or None,
        "last_checkpoint_time": _time_of_checkpoint(checkpoints, committed),
        "machine_faults": read_machine_faults(report, "machineFaults"),
    }


def _time_of_checkpoint(checkpoints: Path, step: int | None) -> float | None:
    if not step:
        return None
    try:
        found = checkpoints.glob(checkpoint_name(step, "*"))
        return max((each.stat().st_mtime for each in found), default=None)
    except OSError:
        return None


def _find_record(job: LocalJob) -> ExitRecord | None:
    """Why it failed; of a run that is done, only what is to be said of it."""
    report = _read_report(job)
    failure, loss = report.get("failure"), report.get("nonFiniteLoss")
    if not isinstance(failure, Mapping):
        loss = NonfiniteLoss.read({"nonfinite_loss": loss})
        ranks = documents.integer(report, "separateRanks") or 0
        if loss is None and not ranks:
            return None
        return ExitRecord(DONE, outcome="done", nonfinite_loss=loss, separate_ranks=ranks)
    found = {"code": documents.integer(report, "trainerExitCode"), **failure}
    found |= {"node": found.get("node") or found.get("agent"), "nonfinite_loss": loss}
    record = ExitRecord.read(found)
    return None if record is None or record.code == DONE else record


def _last_progress(root: Path) -> Mapping[str, Any]:
    """The last event of rank 0 that names the loss and the target; empty without one."""
    for log in sorted(root.glob("node-*/log")):
        try:
            with log.open("rb") as lines:
                start = max(0, lines.seek(0, os.SEEK_END) - _TAIL)
                lines.seek(start)
                if start:
                    lines.readline()  # its beginning is not in the tail, so it may be a print
                tail = lines.read().decode(errors="replace")
        except OSError:
            continue
        for line in reversed(tail.split("\n")):
            event = parse(line) if '"progress"' in line else None
            if event is not None and event["event"] == "progress":
                return event
    return {}


@dataclass(frozen=True)
class RunSnapshot(Snapshot):
    """The status of a run, where rules expect the documents of a cluster."""

    run: LocalJob = field(kw_only=True)

    @cached_property
    def status(self) -> JobStatus:
        """The status of the run."""
        return read_status(self.run)

    @property
    def job(self) -> Mapping[str, Any]:
        """The settings of the run, where rules look for the limits of a job."""
        return {"spec": run_dir.read_json(self.run.root / "train.json") or {}}


def diagnose_run(seen: RunSnapshot) -> Diagnosis:
    """Why the run is in its state."""
    job, status = seen.run, seen.status
    if status.phase is Phase.SUSPENDED:
        words = f"{job.name} is suspended: {status.message}"
        commands: tuple[str, ...] = (job.next_resume,)
        return Diagnosis("suspended", words, "waiting", (), "resume it", commands)
    if status.phase in (Phase.UNKNOWN, Phase.STOPPED) or (
        status.phase is Phase.FAILED and status.exit_record is None
    ):
        cause = name_cause(status.reason or "failed")
        words = f"{job.name} does not run: {status.message or 'its agents left no exit record'}"
        fix = f"start it again: {DiagnosticContext(seen).continuation}"
        commands = (job.next_run, job.kdist("logs", "--tail", "20"))
        return Diagnosis(cause, words, "failed", (), fix, commands)
    found = diagnose(seen)
    # an agent is no Kubernetes object, whose kind would stand before its name
    evidence = tuple(line.removeprefix("pod/") for line in found.evidence)
    found = replace(found, evidence=evidence)
    if found.severity == "failed":
        fix = found.fix.replace("apply and restart", "run it again")
        record = status.exit_record
        again, change = job.next_run, ""
        if record is not None:
            again, change = describe_next(record, job.next_run)
        commands = (job.kdist("logs", "--tail", "20"), again)
        found = replace(found, fix=fix, commands=commands, change=change)
    return found
