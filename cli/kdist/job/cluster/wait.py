"""Waits for a job to reach a status, for its pods to end, or for kdist's controller to act on a
TrainingJob that was applied or changed, up to a timeout whose error names the condition. A wait
continues while the API server is unreachable, and ends when the status can no longer be reached.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kdist.errors import Code, JobNotFoundError, KdistError, NotFoundError
from kdist.job import goals
from kdist.job.cluster.agents import Agents
from kdist.job.cluster.snapshot import Events, fetch_snapshot, finalize
from kdist.job.goals import GOALS, describe_status
from kdist.job.job import Notify
from kdist.manifest import TRAINING_JOB
from kdist.status import (
    CONTROLLER_FIX,
    ExitRecord,
    JobStatus,
    Pod,
    ResourceState,
    Snapshot,
    documents,
    read_pod,
    read_resource,
)
from kdist.status.pods import DONE, STOPPED

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.cluster.applied import AppliedJob

_RELIST_SECONDS = 5.0


@dataclass
class PodExits:
    """The newest exit record of each pod that was observed."""

    records: dict[str, ExitRecord] = field(default_factory=dict)

    def observe(self, pods: Collection[Pod]) -> None:
        """Collect the pods' exit records."""
        for pod in pods:
            if pod.record is not None:
                self.records[pod.name] = pod.record

    @property
    def step(self) -> int | None:
        """The last step that a pod reports as saved; None if none does."""
        return max(
            (record.step for record in self.records.values() if record.step is not None),
            default=None,
        )

    @property
    def failures(self) -> list[tuple[str, ExitRecord]]:
        """(pod, record) of each pod that ended with a failure instead of a save."""
        ended = (DONE, STOPPED)
        return [each for each in self.records.items() if each[1].code not in ended]


def wait_for_exit(
    target: AppliedJob, *, leaving: Collection[str], timeout: float, what: str
) -> PodExits:
    """Wait until the pods of these names have ended or are deleted. They are watched, because the
    exit record of a deleted pod is visible for a moment only. Raises `KdistError` about `what` if
    they did not end within `timeout` seconds (TIMEOUT).
    """
    exits, end = PodExits(), time.monotonic() + timeout
    while True:
        present = [pod for pod in target.pods() if pod.name in leaving]
        exits.observe(present)
        left = {pod.name for pod in present if not pod.over}
        if not left:
            return exits
        remaining = end - time.monotonic()
        if remaining <= 0:
            break
        _watch(target, left, exits, seconds=min(_RELIST_SECONDS, remaining))
    raise KdistError(
        f"{what}: {', '.join(sorted(left))} did not end within {timeout:.0f} s",
        next_command=target.command("why"),
        code=Code.TIMEOUT,
    )


def _watch(target: AppliedJob, left: set[str], exits: PodExits, *, seconds: float) -> None:
    """Watch pods until all in `left` have ended, for at most `seconds`: one may have been deleted
    just before the watch began.
    """
    selector = target.backend.pod_selector(target.name)
    for change, document in target.cluster.watch("v1", "Pod", selector=selector, timeout=seconds):
        pod = read_pod(document)
        if pod.name in left:
            exits.observe([pod])
            if change == "DELETED" or pod.over:
                left.discard(pod.name)
        if not left:
            return


ANSWER_SECONDS: Final = 10.0
"""Seconds after which a controller that has not acted on a TrainingJob is taken to be absent."""
_ANSWER_INTERVAL = 0.25


def wait_for_answer(
    cluster: Cluster,
    changed: Mapping[str, Any],
    *,
    timeout: float = ANSWER_SECONDS,
    settled: bool = False,
) -> ResourceState:
    """Wait until the controller has acted on a TrainingJob, or is acting on it; returns its state.

    Args:
        cluster: the cluster, with the job's namespace.
        changed: the TrainingJob as it was when it was changed.
        timeout: seconds to wait.
        settled: wait for the end of what it does, by which it may find that it cannot; after the
            time-out what it has begun is enough.

    Raises:
        KdistError: the controller does not accept it (USAGE), or does not act on it (TIMEOUT).
        JobNotFoundError: it has been deleted meanwhile.
    """
    name, before = documents.name(changed), documents.mapping(changed, "status")
    generation = documents.integer(changed, "metadata", "generation") or 0
    end = time.monotonic() + timeout
    document: Mapping[str, Any] | None = changed
    begun: ResourceState | None = None
    while document is not None:
        state = read_resource(document)
        if state.refusal:
            raise refuse(cluster, name, state)
        if state.observed_generation >= generation:
            return state
        if documents.mapping(document, "status") != before:
            begun = state  # what it does may take long, such as a restart
        if begun is not None and not settled:
            return begun
        if time.monotonic() >= end:
            break
        time.sleep(_ANSWER_INTERVAL)
        document = cluster.find_readable(*TRAINING_JOB, name)
    if document is None:
        raise JobNotFoundError((name, cluster.namespace))
    if begun is not None:
        return begun
    raise KdistError(
        f"TrainingJob {name} in namespace {cluster.namespace} waits: no controller has acted on it "
        f"for {timeout:.0f} s",
        hint=CONTROLLER_FIX,
        next_command=f"kdist doctor -n {cluster.namespace}",
        code=Code.TIMEOUT,
    )


def refuse(cluster: Cluster, name: str, state: ResourceState) -> KdistError:
    """The error of a TrainingJob that the controller does not accept."""
    return KdistError(
        f"TrainingJob {name} in namespace {cluster.namespace} is not accepted: {state.refusal}",
        hint="change the job file, and apply it again; what runs stays as it is",
        next_command=f"kdist why {name} -n {cluster.namespace}",
        code=Code.USAGE,
    )


STATUS_INTERVAL = 1.0
"""Seconds between two snapshots of a job; twice as many after a minute."""
_SLOW_AFTER = 60.0  # seconds


def wait_for(
    cluster: Cluster,
    name: str,
    goal: str = "done",
    *,
    timeout: float | None = None,
    notify: Notify = lambda _: None,
) -> JobStatus | None:
    """Wait until a job reaches a goal, one of `GOALS`, for `timeout` seconds, or for ever without
    one; `notify` receives each change of the status. Returns the status in which the job reached
    the goal; None if the goal is that it is deleted.

    Raises:
        JobNotFoundError: there is no such job.
        KdistError: the job ended otherwise (JOB_FAILED, JOB_CANCELLED), did not reach the goal in
            time (TIMEOUT), or the API server is unreachable (UNREACHABLE).
    """
    began = time.monotonic()
    deadline = None if timeout is None else began + timeout
    agents = Agents(cluster, namespace=cluster.namespace)
    events = Events(cluster, cluster.namespace)
    snapshot: Snapshot | None = None
    reported = ""
    while True:
        try:
            snapshot = fetch_snapshot(cluster, name, agents=agents, events=events)
        except NotFoundError:
            if goal == "deleted":
                return None
            raise
        except KdistError as error:
            late = snapshot is None if deadline is None else time.monotonic() >= deadline
            if late or error.code is not Code.UNREACHABLE or getattr(error, "status", 500) < 500:
                raise  # a rejected request, in contrast to a server that is unreachable
        else:
            status = snapshot.status
            finalize(cluster, snapshot)
            if GOALS[goal](status):
                return status
            if (line := describe_status(status)) != reported:
                notify(line)
                reported = line
            if goal != "deleted":
                if status.phase.terminal:
                    from kdist.diagnose import diagnose  # a wait that ends well needs no cause

                    cause = partial(diagnose, snapshot)
                    raise goals.end_error(status, goal, explain=cause, command=_why(snapshot))
                if status.reason == "NotAccepted" and status.resource is not None:
                    raise refuse(cluster, name, status.resource)
        if deadline is not None and time.monotonic() >= deadline:
            raise timeout_error(snapshot, goal, timeout or 0.0)
        slow = time.monotonic() - began >= _SLOW_AFTER
        left = (deadline or math.inf) - time.monotonic()
        time.sleep(max(0.0, min(STATUS_INTERVAL * (1 + slow), left)))


def _why(snapshot: Snapshot) -> str:
    option = f" -n {snapshot.status.namespace}" if snapshot.status.namespace else ""
    return f"kdist why {snapshot.status.name}{option}"


def timeout_error(snapshot: Snapshot | None, goal: str, timeout: float) -> KdistError:
    """The error of a wait that timed out, in seconds; without a snapshot the API server never
    responded.
    """
    if snapshot is None:
        return KdistError(
            f"the API server did not answer within {timeout:.0f} s",
            next_command="kdist doctor",
            code=Code.TIMEOUT,
        )
    from kdist.diagnose import diagnose  # a wait that ends well needs no cause

    return goals.timeout_error(
        snapshot.status, goal, timeout, cause=diagnose(snapshot), command=_why(snapshot)
    )
