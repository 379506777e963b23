"""Situations of a job one of whose nodes is gone: `worker-2` with its second pod, a minute after
the power cut, while the agent of the first pod is left. What a test gives replaces a part of that.
"""

from __future__ import annotations

from typing import Any

from kdist.recovery.decision import NodeState, RecoveryContext, Storage
from kdist.status import AgentStatus
from kdist.status.agent_status import PeerStatus
from tests.cli.status.objects import NOW, Document, pod

FIRST, SECOND = "digits-0-abcde", "digits-1-abcde"
OWNER = "uid-of-the-workload"
SHARED = Storage("shared", claim="ckpt")
TIME = NOW.timestamp()


def owned(found: Document, *, owner: str = OWNER, **metadata: Any) -> Document:
    """The pod as a controller created it."""
    reference = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": "digits",
        "uid": owner,
        "controller": True,
    }
    found["metadata"] |= {"ownerReferences": [reference], **metadata}
    return found


def node(name: str, *, ready: str = "True", since: float = 3600, renewed: float = 0) -> NodeState:
    """A node; `since` and `renewed` are seconds before the newest renewal of any Lease."""
    return NodeState(name, ready, TIME - since, "", TIME - renewed)


def gone(*, since: float = 15, renewed: float = 60, ready: str = "Unknown") -> NodeState:
    """The node that does not answer."""
    return node("worker-2", ready=ready, since=since, renewed=renewed)


def agent(
    pod: str, *, heard: tuple[str, ...] = ("10.0.0.1",), age: float = 0.5
) -> dict[str, AgentStatus]:
    """The report of an agent that hears those at these addresses."""
    peers = PeerStatus(frozenset(heard), frozenset(), age)
    return {pod: AgentStatus(pod, "rendezvous", peers=peers)}


def situation(*nodes: NodeState, **changes: Any) -> RecoveryContext:
    """The situation with other nodes next to the control plane and `worker-1`."""
    every = (node("control"), node("worker-1"), *(nodes or (gone(),)))
    given: dict[str, Any] = {
        "job": "digits",
        "pods": [owned(pod(0)), owned(pod(1, node="worker-2"))],
        "owners": frozenset({OWNER}),
        "nodes": {each.name: each for each in every},
        "reports": agent(FIRST),
        "storage": SHARED,
        "read_at": TIME,
        "now": TIME + 1,
    }
    return RecoveryContext(**{**given, **changes})
