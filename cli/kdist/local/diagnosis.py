"""Explains the state of a run on this machine: the rules of `kdist.diagnose` for what its agents
report, and how it ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kdist.diagnose import Diagnosis, diagnose
from kdist.diagnose.rule import DiagnosticContext
from kdist.local import run_dir
from kdist.local.job import LocalJob
from kdist.local.status import read_status
from kdist.local.summary import describe_next
from kdist.status import JobStatus, Phase, Snapshot

_CAUSES = {"NotSaved": "not-saved"}
"""Causes that are not the reason of the status in small letters."""


@dataclass(frozen=True)
class _RunSnapshot(Snapshot):
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


def diagnose_run(job: LocalJob) -> tuple[JobStatus, Diagnosis]:
    """The status of the run, and why it is in it."""
    seen = _RunSnapshot(job.name, run=job)
    status = seen.status
    if status.phase is Phase.SUSPENDED:
        words = f"{job.name} is suspended: {status.message}"
        commands: tuple[str, ...] = (job.next_resume,)
        return status, Diagnosis("suspended", words, "waiting", (), "resume it", commands)
    if status.phase in (Phase.UNKNOWN, Phase.STOPPED) or (
        status.phase is Phase.FAILED and status.exit_record is None
    ):
        cause = _CAUSES.get(status.reason, status.reason.lower()) or "failed"
        words = f"{job.name} does not run: {status.message or 'its agents left no exit record'}"
        fix = f"start it again: {DiagnosticContext(seen).continuation}"
        commands = (job.next_run, job.kdist("logs", "--tail", "20"))
        return status, Diagnosis(cause, words, "failed", (), fix, commands)
    found = diagnose(seen)
    # an agent is no Kubernetes object, whose kind would stand before its name
    evidence = tuple(line.removeprefix("pod/") for line in found.evidence)
    found = replace(found, evidence=evidence)
    if found.severity == "failed":
        fix = found.fix.replace("apply and restart", "run it again")
        record = status.exit_record
        again = job.next_run if record is None else describe_next(record, job.next_run)
        commands = (job.kdist("logs", "--tail", "20"), again)
        found = replace(found, fix=fix, commands=commands)
    return status, found
