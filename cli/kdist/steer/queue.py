"""A job in a queue of Kueue: there Kueue owns the workload's `suspend`, and is asked through its own Workload object."""

from __future__ import annotations

from kdist.errors import KdistError
from kdist.steer.target import Document, Target

_GROUP, _KIND = "kueue.x-k8s.io/", "Workload"


def is_queued(target: Target) -> bool:
    """Whether the job was sent to a queue."""
    return target.job.spec.queue is not None


def set_active(target: Target, *, active: bool, dry_run: bool) -> None:
    """Let Kueue end the job's pods and keep it out, or admit it again. Raises `KdistError` where Kueue knows nothing of it."""
    version = _version(target)
    found = _find(target, version) if version else None
    if version is None or found is None:
        raise KdistError(
            f"{target.name} waits in queue {target.job.spec.queue}, but there is no Workload of Kueue for it",
            hint="is Kueue installed, and does the LocalQueue exist?",
            next_command=target.command("why"),
        )
    target.cluster.patch(version, _KIND, found["metadata"]["name"], {"spec": {"active": active}}, dry_run=dry_run)


def _version(target: Target) -> str | None:
    return max(
        (version for version, kind in target.cluster.kinds() if kind == _KIND and version.startswith(_GROUP)), default=None
    )


def _find(target: Target, version: str) -> Document | None:
    uid = target.workload()["metadata"]["uid"]
    for one in target.cluster.list(version, _KIND):
        if any(owner.get("uid") == uid for owner in one["metadata"].get("ownerReferences") or []):
            return one
    return None
