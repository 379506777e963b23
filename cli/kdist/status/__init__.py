"""Status of a job on a cluster, in words that do not depend on the kind of its workload: documents
in, a `JobStatus` out.

`snapshot` holds the documents of a job and derives the status from them, `job_status` decides the
phase, `step_history` estimates the time left. `pods`, `agent_status` and `resource_state` each read
one kind of document, with the access functions of `documents`, because documents of a cluster may
be incomplete or invalid.

Fetching documents is `kdist.job.cluster`, explaining a phase is `kdist.diagnose`, and showing it is
`kdist.views`. Read `snapshot` first.
"""

from kdist.status.agent_status import (
    SEPARATE_RANKS_FIX,
    AgentStatus,
    RankStatus,
    describe_separate_ranks,
)
from kdist.status.job_status import AVOIDED, AvoidedNode, JobStatus, Nodes, Phase, WorkloadState
from kdist.status.pods import (
    AGAIN,
    BLOCKING,
    FETCHED,
    FETCHER,
    FIXED,
    PACKAGES,
    ContainerTermination,
    ExitRecord,
    FetchProgress,
    InitContainer,
    NonfiniteLoss,
    Pod,
    choose_rerun,
    container_of,
    describe_change,
    find_successor,
    read_index,
    read_pod,
)
from kdist.status.resource_state import (
    CONTROLLER_FIX,
    ResourceState,
    find_owning_resource,
    knows_numbers,
    read_resource,
)
from kdist.status.snapshot import (
    ASKED,
    BACKEND,
    NAMESPACE_VARIABLE,
    OUTCOME,
    RENDEZVOUS,
    RUN_ID,
    STARTED,
    Snapshot,
    read_job,
    read_start,
)
