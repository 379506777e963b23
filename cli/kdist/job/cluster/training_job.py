"""Waits until kdist's controller has acted on a TrainingJob that was applied or changed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kdist.cluster import find_resource
from kdist.errors import Code, JobNotFoundError, KdistError
from kdist.status import CONTROLLER_FIX, ResourceState, documents, read_resource

if TYPE_CHECKING:
    from kdist.cluster import Cluster


ANSWER_SECONDS: Final = 10.0
"""Seconds after which a controller that has not acted on a TrainingJob is taken to be absent."""
_POLL_SECONDS = 0.25


def wait_for_answer(
    cluster: Cluster,
    changed: Mapping[str, Any],
    *,
    timeout: float = ANSWER_SECONDS,
    settled: bool = False,
) -> ResourceState:
    """Wait until the controller has acted on a TrainingJob, or is acting on it.

    Args:
        cluster: the cluster, with the job's namespace.
        changed: the TrainingJob as it was when it was changed.
        timeout: seconds to wait.
        settled: wait for the end of what it does, by which it may find that it cannot; after the
            time-out what it has begun is enough.

    Returns:
        Its state.

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
        time.sleep(_POLL_SECONDS)
        document = find_resource(cluster, name)
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
