"""What sending the objects of a job again would change that the user has not asked for, and what
must not change while it runs.

A job without a TrainingJob is rendered again from its ConfigMap. Whoever may edit ConfigMaps may
lack the right to create pods, so what is rendered is compared with what the cluster has, which only
creators of workloads can write. Where it differs, and where there is nothing to compare with, the
user sees it and is asked, before anything is sent. `keep_immutable` adapts what is rendered to a
workload that runs.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kdist import deploy
from kdist.backends import RUNTIME
from kdist.cluster import ApiError, Applied, Cluster, ForeignError, JobObjects, normalize
from kdist.deploy import live_workload
from kdist.deploy.plan import objects_of
from kdist.job.cluster.applied import AppliedJob, Document, is_workload
from kdist.job.job import Notify
from kdist.manifest import OWNER, Manifest, mark
from kdist.status import read_resource
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json

_POD_LABELS: Final = frozenset(
    {
        "batch.kubernetes.io/controller-uid",
        "batch.kubernetes.io/job-name",
        "controller-uid",
        "job-name",
    }
)
"""Labels that the API server adds to the pods of a Job."""
_NAME_LENGTH: Final = 12  # every kind takes a name of this length, whatever it derives from it


def check(
    target: AppliedJob,
    manifests: Iterable[Manifest],
    workload: Mapping[str, Any] | None,
    *,
    notify: Notify | None = None,
) -> None:
    """Ask the user about what sending the objects would change.

    Args:
        target: the job, as it was applied.
        manifests: its objects, rendered from its ConfigMap without any change by the command.
        workload: its workload as it is in the cluster; None if there is none.
        notify: receives the differences instead, and nobody is asked: for a dry run.

    Raises:
        KdistError: the user does not want it.
        ForeignError: one of the objects belongs to something else.
    """
    found = list(find_changes(target, manifests, workload))
    if not found:
        return
    lines = [line for each in found for line in each.lines()]
    if notify is not None:
        for line in lines:
            notify(line)
        return
    titles = ", ".join(each.manifest.title for each in found)
    subject = f"ConfigMap {target.name} in namespace {target.namespace}"
    if workload is None:
        what = (
            f"{subject} says what {titles} would be, and there is no {target.backend.kind} that "
            "shows that it is what was applied"
        )
    else:
        what = f"{subject} differs from what runs: {titles} would change too"
    target.dialog.approve(what, lines)


def find_changes(
    target: AppliedJob, manifests: Iterable[Manifest], workload: Mapping[str, Any] | None
) -> Iterator[deploy.Difference]:
    """Each object that would be created or changed. ConfigMaps are left out: whoever could have
    changed that of the job can change them all. So is what the user has applied since the workload
    has its pods.
    """
    for each in manifests:
        if each.kind == "ConfigMap" or live_workload.is_recorded(workload, each):
            continue
        try:
            if each.kind == RUNTIME or is_workload(target, each):
                found = _compare(target.cluster, target.objects, each, workload)
            else:
                applied = target.objects.apply(each, dry_run=True)
                found = next(deploy.find_difference(deploy.ApplyResult(each, applied)), None)
        except ForeignError:
            raise
        except ApiError as error:
            if error.owners:
                raise
            # such as a RoleBinding without its Role, or an exhausted quota: nothing is known
            found = deploy.Difference(each, None, normalize(each.document))
        if found is not None:
            yield found


def find_old_end(cluster: Cluster, plan: deploy.Plan | deploy.ResourcePlan) -> str | None:
    """How the job has ended, if the run that has was not one of what is planned: whoever waits for
    the job would take this end for that of a new run. Else None.
    """
    name = plan.job.metadata.name
    if isinstance(plan, deploy.ResourcePlan):
        before = plan.before or {}
        resource = read_resource(before)
        if resource.finished is None or resource.outdated:
            return resource.finished
        asked = objects_of(cluster, name).apply(plan.resource, dry_run=True, force=True)
        return None if asked.document["spec"] == before["spec"] else resource.finished
    objects = objects_of(cluster, name, plan.placement.backend)
    pods = plan.deferred if plan.finished else ()
    changed = any(_compare(cluster, objects, each, plan.workload) for each in pods)
    return plan.finished if changed else None


def _compare(
    cluster: Cluster, objects: JobObjects, manifest: Manifest, workload: Mapping[str, Any] | None
) -> deploy.Difference | None:
    """How the object that is there, the workload or its runtime, differs from the one that would be
    created.

    The server completes the new one in a dry run, with defaults and admission. It has another name
    there, because most fields of a workload cannot be changed.
    """
    live = workload
    if manifest.kind == RUNTIME:
        live = cluster.look_up(manifest.api_version, manifest.kind, manifest.name)
    name = f"kdist-{secrets.token_hex(_NAME_LENGTH)}"[: max(_NAME_LENGTH, len(manifest.name))]
    metadata = manifest.document["metadata"]
    annotations = {**(metadata.get("annotations") or {})}
    if OWNER in annotations:
        annotations[OWNER] = mark(objects.owner.name, manifest.kind, name)
    renamed = {**manifest.document, "metadata": {**metadata, "name": name}}
    renamed["metadata"]["annotations"] = annotations
    applied: Applied = objects.apply(Manifest(renamed), dry_run=True)
    created: Document = _rename(applied.document, name, manifest.name)
    if live is None:
        return deploy.Difference(manifest, None, normalize(created))
    ours = _list_applied(live)
    after = _strip(created, {kind: set(_entries(manifest.document, kind)) for kind in ours})
    known = {kind: keys | set(_entries(after, kind)) for kind, keys in ours.items()}
    before = _strip(live, known)
    return None if before == after else deploy.Difference(manifest, before, after)


def _rename(value: Any, old: str, new: str) -> Any:
    """A copy with another name in all texts that were made from it."""
    if isinstance(value, Mapping):
        return {key.replace(old, new): _rename(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_rename(each, old, new) for each in value]
    return value.replace(old, new) if isinstance(value, str) else value


def _strip(document: Mapping[str, Any], known: Mapping[str, set[str]]) -> Document:
    """The object without its state, its size, and labels and annotations that are not `known`."""
    metadata: Document = {"name": document["metadata"]["name"]}
    for kind, keys in known.items():
        found = {key: value for key, value in _entries(document, kind).items() if key in keys}
        if found:
            metadata[kind] = found
    whole = live_workload.without_sizes(_without_generated(normalize(document)))
    return {**whole, "metadata": metadata}


def _entries(document: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return (document.get("metadata") or {}).get(kind) or {}


def _list_applied(document: Mapping[str, Any]) -> dict[str, set[str]]:
    """The labels and annotations that an apply has set; other programs add their own."""
    found: dict[str, set[str]] = {"labels": set(), "annotations": set()}
    for each in document["metadata"].get("managedFields") or []:
        if each.get("operation") != "Apply":
            continue
        fields = (each.get("fieldsV1") or {}).get("f:metadata") or {}
        for kind, keys in found.items():
            names = fields.get(f"f:{kind}") or {}
            keys |= {key.removeprefix("f:") for key in names if key.startswith("f:")}
    return found


def _without_generated(value: Any) -> Any:
    """A copy without the labels that the server adds to pods."""
    if isinstance(value, list):
        return [_without_generated(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if not live_workload.is_pod(value):
        return {key: _without_generated(each) for key, each in value.items()}
    metadata = dict(value.get("metadata") or {})
    metadata.pop("creationTimestamp", None)  # which older servers write as null
    labels = {
        key: text for key, text in _entries(value, "labels").items() if key not in _POD_LABELS
    }
    return {**value, "metadata": {**metadata, "labels": labels}}


def keep_immutable(
    target: AppliedJob, manifests: Iterable[Manifest], workload: Mapping[str, Any]
) -> list[Manifest]:
    """Adapt rendered objects to a job that is running: fields of its workload that cannot change
    keep their values, and so does the configuration of its agents.

    The ConfigMap with `train.json` stays the one that the workload mounts: the job may have been
    applied by another version of kdist, with other fields.
    """
    prefix = f"{target.name}-train-"
    mounted = {
        str(each["name"])
        for each in _find_all(workload, "configMap")
        if str(each.get("name")).startswith(prefix)
    }
    found = []
    for one in manifests:
        document = one.document
        if is_workload(target, one):
            document = target.backend.keep(document, workload)
            if len(mounted) == 1:
                (name,) = mounted
                text = re.sub(rf'"{prefix}[0-9a-f]+"', f'"{name}"', encode_json(document))
                document = parse_json(text)
        elif one.kind == "ConfigMap" and one.name.startswith(prefix):
            continue
        found.append(Manifest(document))
    return found


def _find_all(document: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Every object under the key `key`, at any depth."""
    if isinstance(document, Mapping):
        for name, value in document.items():
            if name == key and isinstance(value, Mapping):
                yield value
            yield from _find_all(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from _find_all(value, key)
