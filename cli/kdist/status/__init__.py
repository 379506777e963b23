"""What a job is doing, in words that do not depend on the kind of its workload. Pure: documents in, a `JobStatus` out."""

from kdist.status.agent_status import Rank, Report
from kdist.status.exit_record import ExitRecord
from kdist.status.job_status import JobStatus, Nodes, Phase, WorkloadState
from kdist.status.pod import Ended, Pod, container_of, read_pod
from kdist.status.snapshot import ASKED, BACKEND, NAMESPACE_VARIABLE, OUTCOME, RENDEZVOUS, RUN_ID, Snapshot, read_job, read_status

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
    "read_job",
    "read_pod",
    "read_status",
]
