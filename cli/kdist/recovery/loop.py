"""Recovers a job by hand, as a controller would: looks until every pod is decided about, and gives
up those whose nodes are gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kdist import rbac
from kdist.errors import UsageError
from kdist.jobs.agents import Agents
from kdist.recovery.decision import PodDecision, decide
from kdist.recovery.evidence import Situation
from kdist.recovery.observation import observe
from kdist.recovery.replacement import Replacement, replace_pod
from kdist.status import documents
from kdist.units import camel_case

if TYPE_CHECKING:
    from kdist.jobs.job import ClusterJob

RIGHTS: Final = (*rbac.on_pods("patch", part="status"), *rbac.on_pods("delete"))
"""Rights to give up a pod."""
_PAUSE, _LONGEST_PAUSE = 1.0, 10.0  # seconds between two looks
_ATTEMPTS = 5  # that find the pods changed meanwhile

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Recovery:
    """What came of it.

    Attributes:
        decisions: the last decision about each pod whose node does not answer.
        replacements: what was done, by pod; empty without a change.
    """

    decisions: tuple[PodDecision, ...]
    replacements: dict[str, Replacement]

    @property
    def complete(self) -> bool:
        """Whether no pod is left on a node that does not answer."""
        return all(each.recover for each in self.decisions)

    @property
    def hopeless(self) -> bool:
        """Whether waiting does not help a pod that is left."""
        return any(not each.recover and each.retry_seconds is None for each in self.decisions)

    def to_document(self) -> list[dict[str, Any]]:
        """The pods, for programs."""
        found = []
        for each in self.decisions:
            fields = ("pod", "node", "recover", "reason", "message", "retry_seconds")
            done = self.replacements.get(each.pod)
            found.append(
                {
                    **{camel_case(name): getattr(each, name) for name in fields},
                    "evidence": list(each.evidence),
                    "marked": bool(done and done.marked),
                    "deleted": bool(done and done.deleted),
                }
            )
        return found


def recover(
    target: ClusterJob,
    *,
    switched_off: Collection[str] = (),
    wait: bool = True,
    timeout: float | None = None,
    dry_run: bool = False,
    change: bool = True,
    notify: Notify,
) -> Recovery:
    """Give up the pods of a job whose nodes are gone.

    Args:
        target: the job.
        switched_off: nodes that the user vouches for being switched off.
        wait: look again as long as waiting helps a pod.
        timeout: seconds to wait at most; None for no limit.
        dry_run: let the server check the changes, and change nothing.
        change: send changes at all.
        notify: receives a message when the reason to wait changes.

    Raises:
        UsageError: no pod of the job is on a node of `switched_off`.
        KdistError: rights are missing (FORBIDDEN), or the job does not exist.
    """
    if change:
        rbac.require(target.cluster, RIGHTS)
    agents = Agents(target.cluster, namespace=target.namespace)
    end = None if timeout is None else time.monotonic() + timeout
    replacements: dict[str, Replacement] = {}
    decided: dict[str, PodDecision] = {}
    said: set[str] = set()
    attempts = _ATTEMPTS
    while True:
        situation = observe(target, agents=agents, switched_off=switched_off)
        if not decided:
            _check_nodes(target, situation)
        decisions = decide(situation)
        done = _replace(target, situation, decisions, dry_run=dry_run) if change else {}
        changed = [each for each in done.values() if each.changed]
        replacements |= {pod: each for pod, each in done.items() if not each.changed}
        decided = {pod: decided[pod] for pod in replacements if pod in decided}
        decided |= {each.pod: each for each in decisions}
        found = Recovery(tuple(decided.values()), replacements)
        attempts -= bool(changed)
        again = attempts and (changed or (wait and not found.complete and not found.hopeless))
        pauses = [each.retry_seconds for each in decisions if each.retry_seconds is not None]
        pause = _PAUSE if changed else min([_LONGEST_PAUSE, *pauses])
        if not again or (end is not None and time.monotonic() + pause > end):
            return found
        for each in decisions:
            if not each.recover and each.message not in said:
                said.add(each.message)
                notify(f"{each.pod}: {each.message}")
        time.sleep(pause)


def _replace(
    target: ClusterJob, situation: Situation, decisions: list[PodDecision], *, dry_run: bool
) -> dict[str, Replacement]:
    return {
        each.pod: replace_pod(
            target.cluster,
            each,
            namespace=target.namespace,
            owners=situation.owners,
            backend=target.backend,
            dry_run=dry_run,
        )
        for each in decisions
        if each.recover
    }


def _check_nodes(target: ClusterJob, situation: Situation) -> None:
    """Raise `UsageError` for a node that has no pod of the job: it may be a slip of the pen."""
    used = {documents.text(pod, "spec", "nodeName") for pod in situation.pods} - {""}
    for node in sorted(situation.switched_off):
        if node not in used:
            raise UsageError(
                f"--node-is-off {node}: no pod of {target.name} is on that node",
                hint=f"its pods are on {', '.join(sorted(used)) or 'no node'}",
                next_command=target.command("status"),
            )
