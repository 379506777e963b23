"""Makes a job whole again whose node is gone: Kubernetes does not replace a pod on a node that does
not answer, because it may come back.

`observation` fetches what is known of the nodes, `decision` says for each pod whether it may be
given up and why, and `replacement` does it: it marks the pod as failed, so that its controller
creates another one. `evidence` has the values that these three share, and `attachment` says how
long a volume keeps the new pod waiting. All but `observation` and `replacement` are pure.

`loop` puts them together. `kdist recover` looks until it is done; a controller looks once, when a
node of a job is suspect: `observe` with its own way to the agents, `decide`, `replace_pods`, and
again after the shortest `PodDecision.retry_seconds`.
"""

from kdist.recovery.attachment import HeldVolume, find_held_volumes
from kdist.recovery.decision import PodDecision, decide
from kdist.recovery.evidence import NodeState, RecoveryContext, Storage, read_nodes
from kdist.recovery.loop import Recovery, recover, replace_pods
from kdist.recovery.observation import AskAgents, fetch_held_volumes, observe
from kdist.recovery.replacement import Replacement, replace_pod

__all__ = [
    "AskAgents",
    "HeldVolume",
    "NodeState",
    "PodDecision",
    "Recovery",
    "RecoveryContext",
    "Replacement",
    "Storage",
    "decide",
    "fetch_held_volumes",
    "find_held_volumes",
    "observe",
    "read_nodes",
    "recover",
    "replace_pod",
    "replace_pods",
]
