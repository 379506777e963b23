"""Objects go to the cluster by server-side apply: all of a job that is there already, or none of it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kdist import rights
from kdist.deploy.placing import Plan
from kdist.errors import KdistError, NotFoundError
from kdist.manifest import Manifest

if TYPE_CHECKING:
    from kdist.cluster import Applied, Cluster, RefusalError

_RUNTIME_SECONDS = 20.0
_VERDICT = "_2fverdict"  # end of the key under which agents keep how their run ended, as the trainer writes keys
_IMMUTABLE = ("immutable", "updates to statefulset spec", "cannot be changed", "cannot be updated")


class Sent(NamedTuple):
    """An object, and what came of sending it."""

    manifest: Manifest
    applied: Applied


def send(cluster: Cluster, plan: Plan, *, dry_run: bool = False, force: bool = False) -> Iterator[Sent]:
    """Apply the job's objects in their order, each given back as it is done.

    All of it is rehearsed first, so that what the server refuses leaves no half of it behind, and nothing at all is sent
    where one object is somebody else's. Raises `KdistError` with everything that was refused.
    """
    if not dry_run:
        if not plan.exists:
            rights.require(cluster, rights.to_send(plan.manifests))
        for _ in _apply(cluster, plan, dry_run=True, force=force):
            pass
    if plan.revived and not dry_run:
        forget_end(cluster, plan.job.metadata.name)
    yield from _apply(cluster, plan, dry_run=dry_run, force=force)


def forget_end(cluster: Cluster, name: str) -> None:
    """Let the job's agents meet anew where their run has ended before: none may be at work. The ledger keeps its generations."""
    store = f"{name}-rendezvous"
    try:
        found = cluster.get("v1", "ConfigMap", store)
    except NotFoundError:
        return
    if any(key.endswith(_VERDICT) for key in found.get("binaryData") or {}):
        cluster.change("v1", "ConfigMap", store, {"binaryData": None}, job=name)


def _apply(cluster: Cluster, plan: Plan, *, dry_run: bool, force: bool) -> Iterator[Sent]:
    from kdist.cluster import Applied, ForeignError, RefusalError

    refused: list[tuple[Manifest, KdistError]] = []
    for manifest in plan.manifests:
        try:
            applied = _apply_one(cluster, manifest, dry_run=dry_run, force=force)
        except ForeignError as error:
            refused.append((manifest, error))
            continue
        except RefusalError as error:
            if dry_run and (missing := _find_unmade(manifest, error)):
                unchecked = f"{manifest.title} could not be checked: its {missing} was only rehearsed"
                yield Sent(manifest, Applied(manifest.document, "created", warnings=(unchecked,)))
                continue
            if not (dry_run and error.status in (400, 409, 422, 500)):
                raise
            refused.append((manifest, error))
            continue
        yield Sent(manifest, applied)
        if applied.document.get("kind") == "TrainJob" and not dry_run:
            _hand_over_runtime(cluster, applied.document)
    if refused:
        raise _explain(plan, refused)


def _apply_one(cluster: Cluster, manifest: Manifest, *, dry_run: bool, force: bool) -> Applied:
    """Apply an object. Trainer hears of a runtime a moment after it was made; until then it refuses a TrainJob that names it."""
    from kdist.cluster import RefusalError

    end = time.monotonic() + _RUNTIME_SECONDS
    while True:
        try:
            return cluster.apply(manifest, dry_run=dry_run, force=force)
        except RefusalError as error:
            if dry_run or not _waits_for_runtime(manifest, error) or time.monotonic() > end:
                raise
            time.sleep(0.5)


def _find_unmade(manifest: Manifest, error: RefusalError) -> str:
    """The kind of another object of the job without which this one is refused, as that one was rehearsed too; else empty."""
    if _waits_for_runtime(manifest, error):
        return "TrainingRuntime"
    # Who is no admin may bind only what they hold themselves, so the server looks for the Role.
    return "Role" if manifest.kind == "RoleBinding" and error.status == 404 else ""


def _waits_for_runtime(manifest: Manifest, error: RefusalError) -> bool:
    """Whether a TrainJob is refused only because its runtime is not known: it was rehearsed too, or made a moment ago."""
    return manifest.kind == "TrainJob" and re.search(r"[Rr]untime.*not found", str(error)) is not None


def _hand_over_runtime(cluster: Cluster, train_job: Mapping[str, Any]) -> None:
    """Let the TrainJob own the runtime that it is made from, so that the one goes with the other."""
    metadata = train_job["metadata"]
    owner = {
        "apiVersion": train_job["apiVersion"],
        "kind": "TrainJob",
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    runtime = ("TrainingRuntime", metadata["name"])
    found = cluster.get(train_job["apiVersion"], *runtime)
    if owner not in (found["metadata"].get("ownerReferences") or []):
        body = {"metadata": {"ownerReferences": [owner]}}
        cluster.change(train_job["apiVersion"], *runtime, body, job=metadata["name"])


def keep_runtime(cluster: Cluster, manifests: Iterable[Manifest]) -> None:
    """See to it that the TrainingRuntime among these objects outlives its TrainJob, which is about to be deleted.

    The webhooks of Trainer and Kueue ask for it before they let a TrainJob's last finalizer go: a TrainJob whose runtime went
    first, as what it owns does in a foreground deletion, would stay for ever.
    """
    for runtime in (each for each in manifests if each.kind == "TrainingRuntime"):
        try:
            body = {"metadata": {"ownerReferences": None}}
            cluster.change(runtime.api_version, runtime.kind, runtime.name, body, job=runtime.name)
        except NotFoundError:
            cluster.apply(runtime)


def _explain(plan: Plan, refused: list[tuple[Manifest, KdistError]]) -> KdistError:
    """One error for all that was refused: the first one's way out, others' objects' and immutable fields' before any other."""
    from kdist.cluster import ForeignError

    name = plan.job.metadata.name
    if foreign := [error for _, error in refused if isinstance(error, ForeignError)]:
        return ForeignError("\n  ".join(str(each) for each in foreign), hint=foreign[0].hint)
    for _, error in refused:
        if any(sign in str(error) for sign in _IMMUTABLE):
            return KdistError(
                "\n  ".join([f"{name} runs, and these fields cannot change while it does:", *(str(each) for _, each in refused)]),
                hint="`kdist delete` keeps the checkpoints, and the next apply resumes from them",
                next_command=f"kdist delete {name} -n {plan.job.metadata.namespace}",
            )
    first = refused[0][1]
    if len(refused) == 1:
        return first
    return KdistError("\n  ".join(["these objects are refused:", *(str(each) for _, each in refused)]), hint=first.hint)
