"""Replaces the pods of a job whose nodes are gone: once for what is known, as a controller does, or
again and again until every pod is decided about, as a person wants it.

A pod is marked as failed by a disruption, so that its controller creates another one, and removed
where the new one needs its name. Only this one pod is touched, and only as it was judged: its uid
and its version are part of the request. Should its node return, the kubelet ends the pod's
containers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from kdist import rbac
from kdist.backends import Backend
from kdist.cluster import ApiError, JobObjects, JobOwner
from kdist.errors import NotFoundError, UsageError
from kdist.job.cluster.agents import Agents
from kdist.recovery.decision import PodDecision, RecoveryContext, controller_of, decide
from kdist.recovery.observation import observe
from kdist.status import documents
from kdist.status.documents import Document
from kdist.units import camel_case

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.cluster.applied import AppliedJob


CONDITION: Final = "DisruptionTarget"
"""The condition of a pod that ends by no fault of its own: controllers do not count its failure."""
REASON: Final = "NodeLost"
"""Reason of the condition and of the pod's status."""


@dataclass(frozen=True)
class Replacement:
    """What was done to a pod: it was marked as failed, and deleted if the new pod needs its name or
    if it was being deleted already. With `changed` nothing was done, because the pod has changed or
    ended since it was judged.
    """

    pod: str
    marked: bool = False
    deleted: bool = False
    changed: bool = False


def replace_pod(
    cluster: Cluster,
    decision: PodDecision,
    *,
    owner: JobOwner,
    backend: Backend,
    dry_run: bool = False,
) -> Replacement:
    """Mark the pod of a decision as failed, and delete it if its name is needed or it is being
    deleted; not if it has changed or ended since. `owner` has the makers of its pods. With
    `dry_run` the server only checks it. Raises `ValueError` if the decision is to wait, and
    `ApiError` if the server rejects it.
    """
    if not (decision.recover and decision.pod and decision.uid):
        raise ValueError(f"{decision.pod} is not to be replaced: {decision.message}")
    try:
        pod = cluster.get("v1", "Pod", decision.pod, owner.namespace)
    except NotFoundError:
        return Replacement(decision.pod, changed=True)
    over = documents.text(pod, "status", "phase") in ("Succeeded", "Failed")
    same = documents.uid(pod) == decision.uid
    if over or not same or controller_of(pod) not in owner.makers:
        return Replacement(decision.pod, changed=True)
    objects = JobObjects(cluster, owner)
    try:
        marked = objects.change(
            "v1",
            "Pod",
            decision.pod,
            failed_status(pod, decision.message),
            known=pod,
            subresource="status",
            dry_run=dry_run,
        )
    except ApiError as error:
        if error.status not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
            raise
        return Replacement(decision.pod, changed=True)
    if not (backend.reuses_pod_names or documents.text(marked, "metadata", "deletionTimestamp")):
        return Replacement(decision.pod, marked=True)
    uid = documents.uid(marked)
    # at once: no kubelet is there to end it
    deleted = objects.remove("v1", "Pod", documents.name(marked), uid=uid, grace=0, dry_run=dry_run)
    return Replacement(decision.pod, marked=True, deleted=deleted)


def failed_status(pod: Document, message: str) -> dict[str, Any]:
    """The merge patch that marks a pod as failed."""
    others = [
        each
        for each in documents.items(pod, "status", "conditions")
        if documents.text(each, "type") != CONDITION
    ]
    condition = {
        "type": CONDITION,
        "status": "True",
        "reason": REASON,
        "message": message,
        "lastTransitionTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    }
    return {
        "status": {
            "phase": "Failed",
            "reason": REASON,
            "message": message,
            "conditions": [*others, condition],
        },
    }


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
        return all(each.recover for each in self.decisions)

    @property
    def hopeless(self) -> bool:
        return any(not each.recover and each.retry_seconds is None for each in self.decisions)

    def followed_by(self, later: Recovery) -> Recovery:
        """Both together: of pods that were given up, the decision to do so stays."""
        done = {pod: each for pod, each in self.replacements.items() if not each.changed}
        kept = {each.pod: each for each in self.decisions if each.pod in done}
        kept |= {each.pod: each for each in later.decisions}
        return Recovery(tuple(kept.values()), {**done, **later.replacements})

    def to_document(self) -> list[dict[str, Any]]:
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
    target: AppliedJob,
    *,
    switched_off: Collection[str] = (),
    wait: bool = True,
    timeout: float | None = None,
    dry_run: bool = False,
    change: bool = True,
    notify: Notify,
) -> Recovery:
    """Mark the pods of a job whose nodes are gone as failed, as `replace_pod` does, and with `wait`
    look again as long as that helps a pod, for at most `timeout` seconds. `switched_off` are nodes
    that the user vouches for being off. Without `change` nothing is sent, with `dry_run` the server
    only checks it.

    Raises `UsageError` if no pod of the job is on such a node, and `KdistError` if rights are
    missing (FORBIDDEN), or the job does not exist.
    """
    if change:
        rbac.require(target.cluster, RIGHTS)
    ask = Agents(target.cluster, namespace=target.namespace).poll
    end = None if timeout is None else time.monotonic() + timeout
    found, said, attempts = Recovery((), {}), set[str](), _ATTEMPTS
    while True:
        context = observe(target, ask=ask, switched_off=switched_off)
        if not found.decisions:
            used = {documents.text(pod, "spec", "nodeName") for pod in context.pods} - {""}
            for node in sorted(context.switched_off):
                if node not in used:
                    raise UsageError(
                        f"--node-is-off {node}: no pod of {target.name} is on that node",
                        hint=f"its pods are on {', '.join(sorted(used)) or 'no node'}",
                        next_command=target.command("status"),
                    )
        latest = Recovery(tuple(decide(context)), {})
        if change:
            latest = replace_pods(target, context, latest.decisions, dry_run=dry_run)
        changed = any(each.changed for each in latest.replacements.values())
        found = found.followed_by(latest)
        attempts -= changed
        again = attempts and (changed or (wait and not found.complete and not found.hopeless))
        pauses = [each.retry_seconds or _PAUSE for each in latest.decisions if not each.recover]
        pause = _PAUSE if changed else min([_LONGEST_PAUSE, *pauses])
        if not again or (end is not None and time.monotonic() + pause > end):
            return found
        for each in latest.decisions:
            if not each.recover and each.message not in said:
                said.add(each.message)
                notify(f"{each.pod}: {each.message}")
        time.sleep(pause)


def replace_pods(
    target: AppliedJob,
    context: RecoveryContext,
    decisions: Iterable[PodDecision],
    *,
    dry_run: bool = False,
) -> Recovery:
    """Give up those pods of a context that are decided to be. Raises as `replace_pod` does."""
    decided = tuple(decisions)
    owner = replace(target.owner, makers=context.owners)
    how: dict[str, Any] = {"owner": owner, "backend": target.backend, "dry_run": dry_run}
    recovered = [each for each in decided if each.recover]
    done = {each.pod: replace_pod(target.cluster, each, **how) for each in recovered}
    return Recovery(decided, done)
