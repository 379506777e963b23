"""What a job is doing, in words that do not depend on the kind of its workload. Pure: documents in, a `JobStatus` out."""

from kdist.status.job import JobStatus, Nodes, Phase
from kdist.status.pod import Ended, Pod, container_of, read_pod
from kdist.status.read import ASKED, BACKEND, NAMESPACE_VARIABLE, OUTCOME, RENDEZVOUS, RUN_ID, read, read_job
from kdist.status.record import ExitRecord
from kdist.status.report import Rank, Report
from kdist.status.snapshot import Snapshot
from kdist.status.workload import WorkloadState

__all__ = [
    "ASKED",
    "BACKEND",
    "NAMESPACE_VARIABLE",
    "OUTCOME",
    "RENDEZVOUS",
    "RUN_ID",
    "Ended",
    "ExitRecord",
    "JobStatus",
    "Nodes",
    "Phase",
    "Pod",
    "Rank",
    "Report",
    "Snapshot",
    "WorkloadState",
    "container_of",
    "read",
    "read_job",
    "read_pod",
]
