"""Explains why a job does not progress: the root cause, with evidence, a fix and the next commands.
Performs no I/O.

Read `rule` first (the input and the result of a rule), then `ranking`: the rules in order, and the
choice of the root cause. The rules are grouped by what they examine: `admission` (queues, rejected
pods, the controller), `scheduling`, `container_start`, `losses` (of pods, nodes and other objects),
`failures` (exit records, crashes, what agents report) and `runtime` (hangs, the rendezvous,
warnings of Kubernetes).

Fetching the snapshot that they work on belongs to `kdist.job.cluster`.
"""

from kdist.diagnose.losses import KEY_MISSING
from kdist.diagnose.ranking import RULES, diagnose
from kdist.diagnose.rule import Diagnosis
