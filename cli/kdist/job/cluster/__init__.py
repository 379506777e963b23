"""Operations on jobs in a cluster: read, watch, change and delete them.

`job.ClusterJob` has them all; each is in the module of its name (`scale`, `suspend`, `wait`,
`logs`, …), and `changes` is how they change a job: directly, or through its TrainingJob. They start
from an `applied.AppliedJob`, which is read from the cluster, or from a snapshot: everything about
one job at one moment. Read `snapshot` first.

Sending a new job is `kdist.deploy`; what a status means is `kdist.status`.
"""

from kdist.job.cluster.agents import Agents
from kdist.job.cluster.snapshot import fetch_snapshot, list_snapshots
from kdist.job.cluster.wait import wait_for
