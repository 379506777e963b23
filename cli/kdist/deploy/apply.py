"""Sends the objects of a job by server-side apply: all of them are applied with a dry run first, so
that nothing is changed where the API server refuses one of them. Objects that were created before
an error are deleted again. `compare` computes from the dry run what an apply would change.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kdist import backends, rbac
from kdist.deploy.admission import rehearse_pod
from kdist.deploy.delete import find_leftovers
from kdist.deploy.dependents import RUNTIME, adopt, drop_owner
from kdist.deploy.plan import Plan
from kdist.errors import KdistError, NotFoundError
from kdist.manifest import Manifest

if TYPE_CHECKING:
    from kdist.cluster import ApiError, Applied, Cluster

_RUNTIME_SECONDS = 20.0
# end of the key under which agents keep how their run ended, as the trainer writes keys
_VERDICT = "_2fverdict"
_IMMUTABLE = ("immutable", "updates to statefulset spec", "cannot be changed", "cannot be updated")


class ApplyResult(NamedTuple):
    """An object, and what came of sending it."""

    manifest: Manifest
    applied: Applied


def send(
    cluster: Cluster, plan: Plan, *, dry_run: bool = False, force: bool = False
) -> Iterator[ApplyResult]:
    """Apply the job's objects in their order, each given back as it is done.

    All of it is rehearsed first, so that what the server refuses leaves no half of it behind, and
    nothing at all is sent where one object is somebody else's. What is made before an error all the
    same is deleted again. Raises `KdistError` with everything that was refused.
    """
    if dry_run:
        yield from _rehearse(cluster, plan, force=force)
        return
    if not plan.exists:
        rbac.require(cluster, rbac.to_send(plan.manifests))
    elif leftovers := find_leftovers(cluster, plan):  # to be pruned when all is sent
        rbac.require(cluster, rbac.to_delete(leftovers))
    for _ in _rehearse(cluster, plan, force=force):
        pass
    if plan.revived:
        # what was the old workload's may be about to go
        drop_owner(cluster, plan.job.metadata.name)
        forget_end(cluster, plan.job.metadata.name)
    made: list[ApplyResult] = []
    try:
        for each in _apply(cluster, plan, dry_run=False, force=force):
            if each.applied.verb == "created":
                made.append(each)
            yield each
    except KdistError as error:
        if made:
            raise _take_back(cluster, made, error) from error
        raise


def _rehearse(cluster: Cluster, plan: Plan, *, force: bool) -> Iterator[ApplyResult]:
    """What sending would do, and whether the server would have the job's pods too."""
    warnings: list[str] = []
    for each in _apply(cluster, plan, dry_run=True, force=force):
        warnings += each.applied.warnings
        yield each
    rehearse_pod(cluster, plan, tuple(warnings))


def _take_back(cluster: Cluster, made: Iterable[ApplyResult], error: KdistError) -> KdistError:
    """Delete what was made before the error, last made first, those very objects; the error, and
    what became of them.
    """
    gone, left = [], []
    for manifest, applied in reversed(list(made)):
        only = {"metadata": {"uid": applied.document["metadata"]["uid"]}}
        try:
            cluster.delete(manifest.api_version, manifest.kind, manifest.name, only=only)
            gone.append(manifest.title)
        except KdistError:
            left.append(manifest.title)
    told = [f"deleted again: {', '.join(gone)}"] if gone else []
    told += [f"made, and could not be deleted again: {', '.join(left)}"] if left else []
    text = "\n  ".join([error.message, *told])
    return KdistError(text, hint=error.hint, next_command=error.next_command, code=error.code)


def forget_end(cluster: Cluster, name: str) -> None:
    """Let the job's agents meet anew where their run has ended before: none may be at work. The
    ledger keeps its generations.
    """
    store = f"{name}-rendezvous"
    try:
        found = cluster.get("v1", "ConfigMap", store)
    except NotFoundError:
        return
    if any(key.endswith(_VERDICT) for key in found.get("binaryData") or {}):
        cluster.change("v1", "ConfigMap", store, {"binaryData": None}, job=name)


def _apply(cluster: Cluster, plan: Plan, *, dry_run: bool, force: bool) -> Iterator[ApplyResult]:
    from kdist.cluster import ApiError, Applied, ForeignError

    refused: list[tuple[Manifest, KdistError]] = []
    for manifest in plan.manifests:
        try:
            applied = _apply_one(cluster, manifest, dry_run=dry_run, force=force)
        except ForeignError as error:
            refused.append((manifest, error))
            continue
        except ApiError as error:
            if dry_run and (missing := _find_unmade(manifest, error)):
                unchecked = (
                    f"{manifest.title} could not be checked: its {missing} was only rehearsed"
                )
                yield ApplyResult(
                    manifest, Applied(manifest.document, "created", warnings=(unchecked,))
                )
                continue
            if not (dry_run and error.status in (400, 409, 422, 500)):
                raise
            refused.append((manifest, error))
            continue
        if not dry_run and _is_workload(plan, manifest):
            applied = _adopt(cluster, plan, applied)
        yield ApplyResult(manifest, applied)
    if refused:
        raise _explain(plan, refused)


def _is_workload(plan: Plan, manifest: Manifest) -> bool:
    return manifest.kind == backends.get(plan.placement.backend).kind


def _adopt(cluster: Cluster, plan: Plan, applied: Applied) -> Applied:
    """Let all other objects of the job go with its workload, which has just been sent, the last of
    them.
    """
    if titles := adopt(cluster, plan.job.metadata.name, applied.document):
        text = (
            f"{', '.join(titles)} will outlive the job, as you may not give them an owner: "
            "`kdist delete` deletes them"
        )
        return replace(applied, warnings=(*applied.warnings, text))
    return applied


def _apply_one(cluster: Cluster, manifest: Manifest, *, dry_run: bool, force: bool) -> Applied:
    """Apply an object. Trainer hears of a runtime a moment after it was made; until then it refuses
    a TrainJob that names it.
    """
    from kdist.cluster import ApiError

    end = time.monotonic() + _RUNTIME_SECONDS
    while True:
        try:
            return cluster.apply(manifest, dry_run=dry_run, force=force)
        except ApiError as error:
            if dry_run or not _waits_for_runtime(manifest, error) or time.monotonic() > end:
                raise
            time.sleep(0.5)


def _find_unmade(manifest: Manifest, error: ApiError) -> str:
    """The kind of another object of the job without which this one is refused, as that one was
    rehearsed too; else empty.
    """
    if _waits_for_runtime(manifest, error):
        return "TrainingRuntime"
    # Who is no admin may bind only what they hold themselves, so the server looks for the Role.
    return "Role" if manifest.kind == "RoleBinding" and error.status == 404 else ""


def _waits_for_runtime(manifest: Manifest, error: ApiError) -> bool:
    """Whether a TrainJob is refused only because its runtime is not known: it was rehearsed too, or
    made a moment ago.
    """
    return (
        manifest.kind == "TrainJob" and re.search(r"[Rr]untime.*not found", str(error)) is not None
    )


def keep_runtime(cluster: Cluster, manifests: Iterable[Manifest]) -> None:
    """See to it that the TrainingRuntime among these objects is there while its TrainJob is
    deleted.

    The webhooks of Trainer and Kueue ask for it before they let a TrainJob's last finalizer go: a
    TrainJob whose runtime went first, as what it owns does in a foreground deletion, would stay.
    """
    for runtime in (each for each in manifests if each.kind == RUNTIME):
        try:
            cluster.get(runtime.api_version, runtime.kind, runtime.name)
        except NotFoundError:
            cluster.apply(runtime)


def _explain(plan: Plan, refused: list[tuple[Manifest, KdistError]]) -> KdistError:
    """One error for all that was refused: the first one's way out, others' objects' and immutable
    fields' before any other.
    """
    from kdist.cluster import ForeignError

    name = plan.job.metadata.name
    if foreign := [error for _, error in refused if isinstance(error, ForeignError)]:
        return ForeignError("\n  ".join(str(each) for each in foreign), hint=foreign[0].hint)
    for _, error in refused:
        if any(sign in str(error) for sign in _IMMUTABLE):
            return KdistError(
                "\n  ".join(
                    [
                        f"these fields of {name} cannot be changed while it exists:",
                        *(str(each) for _, each in refused),
                    ]
                ),
                hint="`kdist delete` keeps the checkpoints, and the next apply resumes from them",
                next_command=f"kdist delete {name} -n {plan.job.metadata.namespace}",
            )
    first = refused[0][1]
    if len(refused) == 1:
        return first
    return KdistError(
        "\n  ".join(["these objects are refused:", *(str(each) for _, each in refused)]),
        hint=first.hint,
    )


@dataclass(frozen=True)
class Difference:
    """One object before (None: it is new) and after (None: it goes), without the server's own
    fields.
    """

    manifest: Manifest
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def lines(self) -> list[str]:
        """A unified diff of the two as YAML, with kubectl's headers; empty if nothing differs."""
        import difflib

        title = f"{self.manifest.kind}/{self.manifest.name}"
        old, new = self.text(self.before).splitlines(), self.text(self.after).splitlines()
        return list(difflib.unified_diff(old, new, f"live/{title}", f"merged/{title}", lineterm=""))

    @staticmethod
    def text(document: Mapping[str, Any] | None) -> str:
        """A document as YAML, its keys in one order; empty for None."""
        import yaml

        if document is None:
            return ""
        found: str = yaml.dump(
            dict(document), Dumper=_dumper(), sort_keys=True, allow_unicode=True, width=10_000
        )
        return found


@cache
def _dumper() -> Any:
    """A dumper that writes text of several lines line by line, so that a diff shows which of them
    differ.
    """
    import yaml

    class Lines(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # chosen when it runs
        """The dumper."""

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
        )

    Lines.add_representer(str, represent)
    return Lines


def compare(cluster: Cluster, plan: Plan, *, force: bool = False) -> Iterator[Difference]:
    """Each object of the job that would be new, different or gone. Raises `KdistError` with all
    that the server would refuse.
    """
    from kdist.cluster import essence

    for manifest, applied in send(cluster, plan, dry_run=True, force=force):
        if applied.verb != "unchanged":
            before = None if applied.before is None else essence(applied.before)
            yield Difference(manifest, before, essence(applied.document))
    for manifest in find_leftovers(cluster, plan):
        yield Difference(manifest, essence(manifest.document), None)
