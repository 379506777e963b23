"""Explains why a job does not progress: the root cause, with evidence, a fix and the next commands.
Performs no I/O.

Read `rule` first (the input and the result of a rule), then `ranking`: the rules in order, and the
choice of the root cause. The rules are grouped by what they look at: `admission` (queues, rejected
pods), `resource` (the TrainingJob), `scheduling`, `container_start`, `losses` (of pods and nodes),
`deletions` (of other objects), `failures` (exit records, crashes), `agents` (what they tell of
themselves), `hangs`, `runtime`, `warnings` (what Kubernetes says and no other rule knows) and
`exchange`.

Fetching the snapshot that they work on belongs to `kdist.jobs`.
"""

from kdist.diagnose.exchange import KEY_MISSING
from kdist.diagnose.ranking import RULES, diagnose
from kdist.diagnose.rule import Diagnosis

__all__ = ["KEY_MISSING", "RULES", "Diagnosis", "diagnose"]
