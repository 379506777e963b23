"""Makes a job whole again whose node is gone: Kubernetes does not replace a pod on a node that does
not answer, because it may come back.

`observation` fetches what is known of the nodes, `decision` says for each pod whether it may be
given up and why, and `replacement` does it: it marks the pod as failed, so that its controller
creates another one. `evidence` has the values that these three share, and `attachment` says how
long a volume keeps the new pod waiting. All but `observation` and `replacement` are pure.

`kdist recover` does this by hand; a controller does it in its reconcile loop.
"""

from kdist.recovery.attachment import HeldVolume, find_held_volumes, find_waiting_pods
from kdist.recovery.decision import PodDecision, decide
from kdist.recovery.evidence import NodeState, Situation, Storage, read_nodes
from kdist.recovery.observation import fetch_held_volumes, observe
from kdist.recovery.replacement import Replacement, replace_pod

__all__ = [
    "HeldVolume",
    "NodeState",
    "PodDecision",
    "Replacement",
    "Situation",
    "Storage",
    "decide",
    "fetch_held_volumes",
    "find_held_volumes",
    "find_waiting_pods",
    "observe",
    "read_nodes",
    "replace_pod",
]
