"""Runs the checks. A check that fails becomes a finding, and does not affect the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kdist.doctor import cluster_checks
from kdist.doctor.finding import Finding, missing, unknown
from kdist.errors import KdistError

if TYPE_CHECKING:
    from kdist.cluster import Cluster

Check = Callable[["Cluster"], Iterator[Finding]]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("you", cluster_checks.check_identity),
    ("rights", cluster_checks.check_rights),
    ("workload kinds", cluster_checks.check_kinds),
    ("operators", cluster_checks.check_operators),
    ("TrainingJobs", cluster_checks.check_training_jobs),
    ("namespace", cluster_checks.check_namespace),
    ("pods", cluster_checks.check_pod_is_admitted),
    ("quota", cluster_checks.check_quota),
    ("queues", cluster_checks.check_queues),
    ("nodes", cluster_checks.check_nodes),
    ("storage", cluster_checks.check_storage),
    ("DNS", cluster_checks.check_dns),
)
_THREADS = 4


def check_cluster(cluster: Cluster) -> Iterator[Finding]:
    """Check what a job needs of the cluster and the namespace, in the order of `CHECKS`."""
    try:
        version = cluster.version()
    except KdistError as error:
        yield missing(
            "cluster", str(error), error.hint or "check the context's server in the kubeconfig"
        )
        return
    yield cluster_checks.check_version(cluster, version)
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(_run, name, check, cluster) for name, check in CHECKS]
        for future in futures:
            yield from future.result()


def _run(name: str, check: Check, cluster: Cluster) -> list[Finding]:
    try:
        return list(check(cluster))
    except KdistError as error:
        return [unknown(name, str(error), error.hint)]
