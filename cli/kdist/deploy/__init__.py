"""A job goes to a cluster and leaves it: what it becomes there, sending its objects, what a change would do, taking them away."""

from kdist.deploy.code import read_code
from kdist.deploy.dependents import release
from kdist.deploy.difference import Difference, compare
from kdist.deploy.placing import Plan, plan
from kdist.deploy.pruning import prune
from kdist.deploy.removing import find_objects, remove
from kdist.deploy.sending import Sent, forget_end, keep_runtime, send

__all__ = [
    "Difference",
    "Plan",
    "Sent",
    "compare",
    "find_objects",
    "forget_end",
    "keep_runtime",
    "plan",
    "prune",
    "read_code",
    "release",
    "remove",
    "send",
]
