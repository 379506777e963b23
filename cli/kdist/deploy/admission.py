"""What Pod Security of the namespace will refuse, found before anything is created.

It refuses pods, and of workloads it only warns, so that a job would be there and never have a pod.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kdist.deploy.plan import Plan
from kdist.errors import Code, KdistError
from kdist.render import find_pods

if TYPE_CHECKING:
    from kdist.cluster import Cluster

ENFORCE = "pod-security.kubernetes.io/enforce"
# `violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container …), …`
_VIOLATION = re.compile(r'violates? PodSecurity "(?P<level>[^":]+)[^"]*": (?P<why>.*)', re.DOTALL)


def rehearse_pod(cluster: Cluster, plan: Plan, warned: tuple[str, ...]) -> None:
    """Let the server judge a pod of the job, which it does not keep. Raises `KdistError` where it
    refuses it.

    Of the reasons to refuse a pod only Pod Security's is believed: a quota's may pass, and so may
    that of a webhook. Who may not create pods is told by what the server `warned` of the workload.
    """
    templates = (pod for each in plan.manifests for pod in find_pods(each.document))
    template = next(templates, None)
    if template is None:
        return
    # The job's account is not there yet, and a pod with none has the namespace's.
    spec = {key: value for key, value in template["spec"].items() if key != "serviceAccountName"}
    labels = (template.get("metadata") or {}).get("labels") or {}
    metadata = {"name": f"{plan.job.metadata.name}-rehearsed", "labels": labels}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    try:
        cluster.create(pod, dry_run=True, again=False)
        return
    except KdistError as error:
        text, may = error.message, error.code != Code.FORBIDDEN
    if found := _VIOLATION.search(text):
        raise _refuse(cluster, found)
    if not may:
        _read_warnings(cluster, warned)


def _read_warnings(cluster: Cluster, warned: tuple[str, ...]) -> None:
    """Raise what the warnings say, where their level is the one that the namespace enforces."""
    from kdist.cluster import ApiError

    found = next(filter(None, map(_VIOLATION.search, warned)), None)
    if found is None:
        return
    try:
        namespace = cluster.get("v1", "Namespace", cluster.namespace)
    except ApiError:
        return  # then the warning, which is shown, is all that is known
    if (namespace["metadata"].get("labels") or {}).get(ENFORCE) == found["level"]:
        raise _refuse(cluster, found)


def _refuse(cluster: Cluster, found: re.Match[str]) -> KdistError:
    return KdistError(
        f"namespace {cluster.namespace} enforces Pod Security `{found['level']}`, which "
        "refuses the "
        f"job's pods: {found['why'].strip()}",
        hint=(
            "what kdist makes meets `restricted`: change podTemplate, or send the job to "
            "another namespace"
        ),
        next_command="kdist render --annotate",
    )
