"""What a job on a cluster is doing, fetched in few requests: snapshots, waiting, and the logs of all its pods."""

from kdist.follow.agents import Agents
from kdist.follow.fetch import snapshot, survey
from kdist.follow.heard import Events
from kdist.follow.settle import settle
from kdist.follow.wait import GOALS, describe, ending, until

__all__ = ["GOALS", "Agents", "Events", "describe", "ending", "settle", "snapshot", "survey", "until"]
