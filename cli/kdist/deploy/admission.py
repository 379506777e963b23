"""Checks in advance whether the namespace's Pod Security will reject the job's pods.

Pod Security rejects pods but only warns about workloads, so a job would exist and never get a pod.

`check_names` finds objects that have the names of a job's objects but belong to somebody else,
before a TrainingJob is sent: the controller would not accept it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kdist.deploy.plan import Plan
from kdist.errors import Code, KdistError
from kdist.manifest import ForeignError, JobOwner, Manifest, find_owner
from kdist.render import find_pods
from kdist.status import documents, find_owning_resource

if TYPE_CHECKING:
    from kdist.cluster import Cluster


ENFORCE = "pod-security.kubernetes.io/enforce"
# `violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container …), …`
_VIOLATION = re.compile(r'violates? PodSecurity "(?P<level>[^":]+)[^"]*": (?P<why>.*)', re.DOTALL)


def check_pod_admission(cluster: Cluster, plan: Plan, warned: tuple[str, ...]) -> None:
    """Create a pod of the job in a server-side dry run. Raises `KdistError` if Pod Security rejects
    it.

    Only rejections by Pod Security count: quotas and webhooks may change their mind. For a user who
    may not create pods, the server's warnings about the workload are used instead.
    """
    templates = (pod for each in plan.manifests for pod in find_pods(each.document))
    template = next(templates, None)
    if template is None:
        return
    try:
        pod = make_trial_pod(f"{plan.job.metadata.name}-dry-run", template)
        cluster.send_create(pod, dry_run=True, retry=False)
        return
    except KdistError as error:
        text, may = error.message, error.code != Code.FORBIDDEN
    if found := _VIOLATION.search(text):
        raise _refuse(cluster, found)
    # a warning counts if its level is the one that the namespace enforces
    warning = None if may else next(filter(None, map(_VIOLATION.search, warned)), None)
    if warning is not None and _find_enforced(cluster) == warning["level"]:
        raise _refuse(cluster, warning)


def make_trial_pod(name: str, template: Mapping[str, Any]) -> dict[str, Any]:
    """The pod of a rendered template, for a dry run. The job's service account does not exist yet;
    a pod without one gets the namespace's default.
    """
    spec = {key: value for key, value in template["spec"].items() if key != "serviceAccountName"}
    metadata = {"name": name, "labels": documents.mapping(template, "metadata", "labels")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _find_enforced(cluster: Cluster) -> str:
    """The level that the namespace enforces; empty if it cannot be read."""
    from kdist.cluster import ApiError

    try:
        return documents.label(cluster.get("v1", "Namespace", cluster.namespace), ENFORCE)
    except ApiError:
        return ""  # the warning itself has been shown


def _refuse(cluster: Cluster, found: re.Match[str]) -> KdistError:
    return KdistError(
        f"namespace {cluster.namespace} enforces Pod Security `{found['level']}`, which "
        f"rejects the job's pods: {found['why'].strip()}",
        hint=("kdist's own pods meet `restricted`: change podTemplate, or use another namespace"),
        next_command="kdist explain spec.podTemplate",
    )


_UNBORN = "-"  # stands for the uid of a TrainingJob that is not created yet


def check_names(cluster: Cluster, owner: JobOwner, manifests: Iterable[Manifest]) -> None:
    """Look for each of the objects that the controller will create for the TrainingJob, a new one
    if `owner` has no uid. Those of an earlier TrainingJob of the name are left out: they are
    garbage-collected. Raises `ForeignError`, which names all of them, if some exist and are not the
    job's.
    """
    owner = replace(owner, uid=owner.uid or _UNBORN)

    def find(manifest: Manifest) -> ForeignError | None:
        found = cluster.find_readable(manifest.api_version, manifest.kind, manifest.name)
        if found is None:
            return None  # the controller looks too
        try:
            owner.check(found, api_version=manifest.api_version, kind=manifest.kind)
        except ForeignError as error:
            earlier = find_owner(found, manifest.kind) == owner.name and find_owning_resource(found)
            return None if earlier else error
        return None

    with ThreadPoolExecutor(8) as pool:
        rivals = [each for each in pool.map(find, list(manifests)) if each is not None]
    if rivals:
        raise join(rivals)


def join(errors: list[ForeignError]) -> KdistError:
    """One error for all objects that belong to others. Its hint is that of the first; with several
    there is one fix for each.
    """
    hints = list(dict.fromkeys(each.hint for each in errors))
    return ForeignError("\n  ".join(str(each) for each in errors), hint="; ".join(hints))
