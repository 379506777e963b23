"""Recovers a job from the loss of a node: Kubernetes does not replace a pod on a node that does not
answer, because it may come back.

`observation` fetches what is known of the nodes and asks the job's agents, `decision` says for each
pod whether it may be evicted and why, and `replacement` does it: it marks the pod as failed, so
that its controller creates another one. `decision` is pure; read it first.

`avoidance` keeps a job's pods from a node that answers and is faulty.

`kdist recover` repeats this until every pod is decided about. A controller does it once, when a
node of a job is suspect: `observe` with its own way to the agents, `decide`, `replace_pods`, and
again after the shortest `PodDecision.retry_seconds`.
"""

from kdist.recovery.avoidance import AVOID_SECONDS, allow, avoid
from kdist.recovery.decision import (
    HeldVolume,
    PodDecision,
    decide,
)
from kdist.recovery.observation import fetch_held_volumes, observe
from kdist.recovery.replacement import Recovery, recover, replace_pods
