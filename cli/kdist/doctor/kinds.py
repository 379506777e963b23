"""Which workload kinds the cluster has, and whether the operators behind them are at work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kdist import backends
from kdist.backends import operators
from kdist.cluster import MissingError, RefusalError
from kdist.doctor.finding import Finding, missing, note, ok, unknown

if TYPE_CHECKING:
    from kdist.cluster import Cluster


def check_kinds(cluster: Cluster) -> Iterator[Finding]:
    """One finding for all kinds: what jobs may become, and what `backend: auto` chooses."""
    served = cluster.kinds()
    found: list[str] = []
    absent: list[str] = []
    for name in backends.NAMES:
        backend = backends.get(name)
        (found if (backend.api_version, backend.kind) in served else absent).append(name)
    chosen = backends.choose(served)
    yield ok("workload kinds", f"{', '.join(found)} (`backend: auto` takes {chosen})")
    if absent:
        yield note("workload kinds", f"not there: {', '.join(absent)}", "install their operators if your jobs name them")


def check_operators(cluster: Cluster) -> Iterator[Finding]:
    """A kind whose operator is away takes objects and does nothing with them."""
    served = {kind for _, kind in cluster.kinds()}
    wanted = [kind for kind in operators.OPERATORS if kind in served]
    if not wanted:
        return
    try:
        deployments = cluster.list("apps/v1", "Deployment", all_namespaces=True)
    except (RefusalError, MissingError) as error:
        yield unknown("operators", f"of {', '.join(wanted)}: {error}")
        return
    for kind in wanted:
        found = operators.find_deployment(deployments, kind)
        if found is None:
            project = operators.OPERATORS[kind].project
            yield note(
                f"operator of {kind}", "no deployment is named as it is", f"if {kind} objects stay as they are, install {project}"
            )
            continue
        home, name = found["metadata"]["namespace"], found["metadata"]["name"]
        where = f"{home}/{name}"
        ready, _ = operators.count_ready(found)
        if ready:
            yield ok(f"operator of {kind}", f"{where} is ready")
        else:
            taken = f"{where} is not ready: {kind} objects are taken and nothing happens"
            yield missing(f"operator of {kind}", taken, f"kubectl -n {home} describe deployment {name}")
