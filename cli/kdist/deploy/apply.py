"""Sends the objects of a job by server-side apply: all of them are applied with a dry run first, so
that nothing is changed where the API server refuses one of them. Objects that were created before
an error are deleted again. `find_difference` reads from the dry run what an apply would change.

`create_key` creates the key of a job's exchange: a Secret with a random value, created once and
mounted into the job's pods. kdist never reads it back: the only right on Secrets that it needs is
to create them. The Secret's owner is the job's ConfigMap or its TrainingJob, so the garbage
collector deletes it with that owner.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from kdist import backends, rbac, render
from kdist.backends import RUNTIME
from kdist.deploy import live_workload
from kdist.deploy.admission import check_pod_admission, join
from kdist.deploy.code_upload import upload_code
from kdist.deploy.delete import adopt, drop_owner, find_leftovers, undo
from kdist.deploy.plan import ApplyResult, Plan, objects_of
from kdist.errors import KdistError, NotFoundError
from kdist.manifest import (
    JOB_LABEL,
    MANAGED_BY,
    OWNER,
    ForeignError,
    Manifest,
    mark,
    name_rendezvous,
    refer_to,
)
from kdist.status import ASKED, ExitRecord, read_job
from kdist_trainer.formats import REQUESTED_AT

if TYPE_CHECKING:
    from kdist.backends import Placement
    from kdist.cluster import ApiError, Applied, Cluster, JobObjects, JobOwner
    from kdist.spec import TrainingJob


_KEY_BYTES: Final = 32


def create_key(
    objects: JobObjects, job: TrainingJob, placement: Placement, owner: Mapping[str, Any]
) -> str:
    """Create the key of a job's exchange, unless it exists; returns why that is not possible, or
    nothing. Then the job's agents exchange through the ConfigMap of their rendezvous.

    Args:
        objects: what creates the job's objects.
        job: the job.
        placement: how it is placed.
        owner: the owner reference of the Secret.
    """
    from kdist.cluster import ApiError

    if placement.rendezvous != "kubernetes":
        return ""  # where agents share a store that is no ConfigMap
    name = render.name_exchange_secret(job, placement)
    document = {
        "apiVersion": backends.KEY_KIND[0],
        "kind": backends.KEY_KIND[1],
        "metadata": {
            "name": name,
            "labels": {MANAGED_BY: "kdist", JOB_LABEL: job.metadata.name},
            "annotations": {OWNER: mark(job.metadata.name, backends.KEY_KIND[1], name)},
            "ownerReferences": [{**owner, "controller": False, "blockOwnerDeletion": False}],
        },
        "type": "kdist.dev/exchange-key",
        "immutable": True,
        "stringData": {"key": secrets.token_hex(_KEY_BYTES)},
    }
    try:
        objects.create(document)
    except ApiError as error:
        if error.status == HTTPStatus.CONFLICT:
            return ""  # it is made once
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        return (
            f"secret/{name} could not be created ({error}): the job's agents exchange through the "
            "ConfigMap alone, and notice later which of them are lost"
        )
    return ""


_RUNTIME_SECONDS = 20.0  # for which a TrainJob is retried until Trainer knows its runtime
# suffix of the key under which the agents store the run result, in the trainer's encoding
_RESULT_KEY_SUFFIX = "_2frun_5fresult"


def send(
    cluster: Cluster,
    plan: Plan,
    *,
    notify: Callable[[str], None] = lambda _: None,
    dry_run: bool = False,
    force: bool = False,
) -> Iterator[ApplyResult]:
    """Apply the job's objects in order.

    A server-side dry run of all objects comes first, so nothing is applied if the API server
    rejects one of them or one has another owner. Objects that were created before a later error are
    deleted again.

    Args:
        cluster: the cluster to apply to.
        plan: the job and its objects.
        notify: receives what takes long.
        dry_run: stop after the dry run.
        force: take over fields of other field managers.

    Yields:
        Each object with its result, as soon as it is applied.

    Raises:
        KdistError: with everything that was rejected.
    """
    if dry_run:
        yield from _dry_run(cluster, plan, force=force)
        return
    if not plan.exists:
        rbac.require(cluster, rbac.to_send(plan.manifests))
    elif leftovers := find_leftovers(cluster, plan):  # pruned after everything is applied
        rbac.require(cluster, rbac.to_delete(leftovers))
    for _ in _dry_run(cluster, plan, force=force):
        pass
    created = upload_code(cluster, plan, plan.folder, plan.config_map, notify)
    made = [each.manifest for each in created]
    try:
        yield from created
        if plan.exists and plan.workload is None:
            # objects owned by the old workload may be about to be garbage-collected
            drop_owner(cluster, plan.job.metadata.name)
            forget_end(cluster, _objects(cluster, plan).owner)
        plan = replace(plan, manifests=[each for each in plan.manifests if each not in made])
        for each in _apply(cluster, plan, dry_run=False, force=force):
            if each.applied.verb == "created":
                created.append(each)
            applied = each.applied
            # the key's owner is the job's own ConfigMap
            if (each.manifest.kind, each.manifest.name) == ("ConfigMap", plan.job.metadata.name):
                owner = refer_to(applied.document)
                warning = create_key(_objects(cluster, plan), plan.job, plan.placement, owner)
                more = (warning,) if warning else ()
                applied = replace(applied, warnings=(*applied.warnings, *more))
            yield each._replace(applied=applied)
        if plan.workload is not None:
            backend = plan.placement.backend
            live_workload.record(_objects(cluster, plan), plan.workload, backend, plan.deferred)
        asked = plan.job.spec.suspend or (plan.restored and plan.placement.suspended)
        if asked and plan.job.spec.queue is None:  # so that `kdist resume` starts it
            body = {"metadata": {"annotations": {ASKED: "suspended"}}}
            _objects(cluster, plan).change("v1", "ConfigMap", plan.job.metadata.name, body)
    except KdistError as error:
        if created:
            raise undo(_objects(cluster, plan), created, error) from error
        raise


def _dry_run(cluster: Cluster, plan: Plan, *, force: bool) -> Iterator[ApplyResult]:
    """Apply with a server-side dry run, and check that the job's pods would be admitted."""
    warnings: list[str] = []
    for each in _apply(cluster, plan, dry_run=True, force=force):
        warnings += each.applied.warnings
        yield each
    check_pod_admission(cluster, plan, tuple(warnings))


def forget_end(cluster: Cluster, owner: JobOwner) -> None:
    """Clear the rendezvous of a finished run, so that new agents can rendezvous. No agent may be
    running. Generations continue from the ledger.
    """
    from kdist.cluster import JobObjects

    if find_result(cluster, owner) is not None:
        body = {"binaryData": None}
        JobObjects(cluster, owner).change("v1", "ConfigMap", name_rendezvous(owner.name), body)


def request_start(cluster: Cluster, owner: JobOwner, job: TrainingJob | None) -> None:
    """Record that a user has the job start again. Agents never start a script that cannot continue
    again by themselves, only for a request that is newer than what they have started.
    """
    from kdist.cluster import JobObjects

    if job is None or job.spec.script is None or job.spec.max_restarts is not None:
        return
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    body = {"metadata": {"annotations": {REQUESTED_AT: now}}}
    with suppress(NotFoundError):  # the agents meet elsewhere
        JobObjects(cluster, owner).change("v1", "ConfigMap", name_rendezvous(owner.name), body)


def find_result(cluster: Cluster, owner: JobOwner) -> ExitRecord | None:
    """How a job's run has ended, as its agents have stored it in the rendezvous, which is the job's
    own; None if it has not, or if they store it elsewhere.
    """
    found = cluster.look_up("v1", "ConfigMap", name_rendezvous(owner.name), owner.namespace)
    if found is None or not owner.owns(found, "ConfigMap"):
        return None
    for key, value in (found.get("binaryData") or {}).items():
        if key.endswith(_RESULT_KEY_SUFFIX):
            text = b64decode(value).decode(errors="replace")
            return ExitRecord.parse(text) or ExitRecord(1, outcome="failed")
    return None


def _apply(cluster: Cluster, plan: Plan, *, dry_run: bool, force: bool) -> Iterator[ApplyResult]:
    from kdist.cluster import ApiError, Applied

    rejected: list[tuple[Manifest, KdistError]] = []
    objects = _objects(cluster, plan)
    for manifest in plan.manifests:
        try:
            applied = _apply_one(objects, manifest, dry_run=dry_run, force=force)
        except ForeignError as error:
            rejected.append((manifest, error))
            continue
        except ApiError as error:
            if dry_run and (missing := _find_missing_kind(manifest, error)):
                unchecked = (
                    f"{manifest.title} could not be checked: its {missing} does not exist in a "
                    "dry run"
                )
                yield ApplyResult(
                    manifest, Applied(manifest.document, "created", warnings=(unchecked,))
                )
                continue
            if not (dry_run and error.status in (400, 409, 422, 500)):
                raise
            rejected.append((manifest, error))
            continue
        # the workload, which is applied last, becomes the owner of the job's other objects
        is_workload = manifest.kind == backends.get(plan.placement.backend).kind
        adopts = is_workload and not dry_run
        if adopts and (titles := adopt(cluster, plan.job.metadata.name, applied.document)):
            text = (
                f"{', '.join(titles)} will outlive the job, because you may not set their owner: "
                "`kdist delete` deletes them"
            )
            applied = replace(applied, warnings=(*applied.warnings, text))
        yield ApplyResult(manifest, applied)
    if rejected:
        raise _explain(cluster, plan, rejected)


def _objects(cluster: Cluster, plan: Plan) -> JobObjects:
    return objects_of(cluster, plan.job.metadata.name, plan.placement.backend)


def _apply_one(objects: JobObjects, manifest: Manifest, *, dry_run: bool, force: bool) -> Applied:
    """Apply an object. Trainer sees a new runtime only after a moment; until then it rejects a
    TrainJob that names it, which is retried.
    """
    from kdist.cluster import ApiError

    end = time.monotonic() + _RUNTIME_SECONDS
    while True:
        try:
            return objects.apply(manifest, dry_run=dry_run, force=force)
        except ApiError as error:
            if dry_run or not _waits_for_runtime(manifest, error) or time.monotonic() > end:
                raise
            time.sleep(0.5)


def _find_missing_kind(manifest: Manifest, error: ApiError) -> str:
    """The kind of another object of the job whose absence in a dry run causes this rejection; else
    empty.
    """
    if _waits_for_runtime(manifest, error):
        return "TrainingRuntime"
    # Users may bind only permissions that they have, so the server looks up the Role.
    return "Role" if manifest.kind == "RoleBinding" and error.status == 404 else ""


def _waits_for_runtime(manifest: Manifest, error: ApiError) -> bool:
    """Whether a TrainJob is rejected only because its runtime is not known yet: it was created a
    moment ago, or only in a dry run.
    """
    return (
        manifest.kind == "TrainJob" and re.search(r"[Rr]untime.*not found", str(error)) is not None
    )


def keep_runtime(cluster: Cluster, name: str, manifests: Iterable[Manifest]) -> None:
    """Make sure that the TrainingRuntime among these objects exists while its TrainJob is deleted.

    The webhooks of Trainer and Kueue look it up before they remove a TrainJob's last finalizer: a
    TrainJob whose runtime is deleted first, as a foreground deletion does, would never go away.
    """
    for runtime in (each for each in manifests if each.kind == RUNTIME):
        if cluster.look_up(runtime.api_version, runtime.kind, runtime.name) is None:
            objects_of(cluster, name).apply(runtime)


def _changed_fields(before: Any, now: Any, path: str = "spec") -> Iterator[str]:
    """Yield the fields that differ; lists as a whole."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            yield from _changed_fields(before.get(name), now.get(name), f"{path}.{name}")
    elif before != now:
        yield path


def _explain(
    cluster: Cluster, plan: Plan, rejected: list[tuple[Manifest, KdistError]]
) -> KdistError:
    """One error for everything that was rejected. Objects of other owners take precedence, then
    immutable fields, then the first error.
    """
    name = plan.job.metadata.name
    if foreign := [error for _, error in rejected if isinstance(error, ForeignError)]:
        return join(foreign)
    for _, error in rejected:
        if any(each in str(error) for each in backends.get(plan.placement.backend).refusals):
            first = f"these fields of {name} cannot be changed while it exists:"
            before = read_job(cluster.look_up("v1", "ConfigMap", name) or {})
            fields = ", ".join(_changed_fields(before.get("spec"), plan.job.to_document()["spec"]))
            changed = [f"changed in the job file: {fields}"] if before and fields else []
            hint = "`kdist delete` keeps the checkpoints, and the next apply resumes from them"
            if plan.job.spec.checkpoints is None:
                hint = "it has no checkpoints: `kdist delete`, then apply, starts it at step 0"
            return KdistError(
                "\n  ".join([first, *(str(each) for _, each in rejected), *changed]),
                hint=hint,
                next_command=f"kdist delete {name} -n {plan.job.metadata.namespace}",
            )
    error = rejected[0][1]
    if len(rejected) == 1:
        return error
    lines = ["these objects were rejected:", *(str(each) for _, each in rejected)]
    return KdistError("\n  ".join(lines), hint=error.hint)


@dataclass(frozen=True)
class Difference:
    """One object before (None: it is new) and after (None: it is deleted), without server-set
    fields.
    """

    manifest: Manifest
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def lines(self) -> list[str]:
        """A unified diff of the two as YAML, with kubectl's headers; empty if nothing differs.
        Binary values are shown by digest and size.
        """
        import difflib

        title = f"{self.manifest.kind}/{self.manifest.name}"
        texts = (self.text(_describe_bytes(each)) for each in (self.before, self.after))
        old, new = (each.splitlines() for each in texts)
        return list(difflib.unified_diff(old, new, f"live/{title}", f"merged/{title}", lineterm=""))

    @staticmethod
    def text(document: Mapping[str, Any] | None) -> str:
        """A document as YAML with sorted keys; empty for None."""
        import yaml

        if document is None:
            return ""
        found: str = yaml.dump(
            dict(document), Dumper=_dumper(), sort_keys=True, allow_unicode=True, width=10_000
        )
        return found


def _describe_bytes(document: dict[str, Any] | None) -> dict[str, Any] | None:
    """A copy of a ConfigMap with the digest and the size of each binary value, of which the base64
    is one line, up to a megabyte long; all else as it is.
    """
    values = None if document is None else document.get("binaryData")
    if document is None or not isinstance(values, dict):
        return document
    data = {name: b64decode(str(value)) for name, value in values.items()}
    shown = {
        name: f"sha256 {hashlib.sha256(each).hexdigest()}, {len(each):,} bytes"
        for name, each in data.items()
    }
    return {**document, "binaryData": shown}


@cache
def _dumper() -> Any:
    """A dumper that writes multi-line text as a block, so that a diff shows the changed lines."""
    import yaml

    class Lines(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # chosen when it runs
        """Writes multi-line text as a block."""

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
        )

    Lines.add_representer(str, represent)
    return Lines


def find_difference(result: ApplyResult) -> Iterator[Difference]:
    """The difference that an object's dry run shows, if there is one."""
    from kdist.cluster import normalize

    manifest, applied = result
    if applied.verb != "unchanged":
        before = None if applied.before is None else normalize(applied.before)
        yield Difference(manifest, before, normalize(applied.document))
