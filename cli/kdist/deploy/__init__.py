"""A job goes to a cluster and leaves it: what it becomes there, sending its objects, what a change
would do, taking them away.
"""

from kdist.deploy.apply import ApplyResult, Difference, compare, forget_end, keep_runtime, send
from kdist.deploy.delete import find_objects, prune, remove
from kdist.deploy.dependents import drop_owner
from kdist.deploy.plan import Plan, make_plan, read_code

__all__ = [
    "ApplyResult",
    "Difference",
    "Plan",
    "compare",
    "drop_owner",
    "find_objects",
    "forget_end",
    "keep_runtime",
    "make_plan",
    "prune",
    "read_code",
    "remove",
    "send",
]
