"""What a job is doing, in words that do not depend on the kind of its workload. Pure: documents in,
a `JobStatus` out.
"""

from kdist.status.agent_status import AgentStatus, RankStatus
from kdist.status.exit_record import ExitRecord
from kdist.status.job_status import JobStatus, Nodes, Phase, WorkloadState
from kdist.status.pod import ContainerTermination, Pod, container_of, read_pod
from kdist.status.snapshot import (
    ASKED,
    BACKEND,
    NAMESPACE_VARIABLE,
    OUTCOME,
    RENDEZVOUS,
    RUN_ID,
    Snapshot,
    read_job,
    read_status,
)

__all__ = [
    "ASKED",
    "BACKEND",
    "NAMESPACE_VARIABLE",
    "OUTCOME",
    "RENDEZVOUS",
    "RUN_ID",
    "AgentStatus",
    "ContainerTermination",
    "ExitRecord",
    "JobStatus",
    "Nodes",
    "Phase",
    "Pod",
    "RankStatus",
    "Snapshot",
    "WorkloadState",
    "container_of",
    "read_job",
    "read_pod",
    "read_status",
]
