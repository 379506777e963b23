"""Checks of a cluster: version, identity and permissions, the workload kinds and their operators,
what the namespace provides (Pod Security, quota, queues, nodes, GPUs, storage, DNS), and whether it
serves TrainingJobs, `kdist apply` sends them, and a controller acts on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kdist import backends, rbac
from kdist.backends import operators
from kdist.cluster import ApiError, ApiNotFoundError
from kdist.cluster.api_errors import no_namespace
from kdist.doctor.finding import Finding, missing, note, ok, unknown
from kdist.errors import Code
from kdist.manifest import TRAINING_JOB, group_kind
from kdist.rbac import Right
from kdist.status import CONTROLLER_FIX, documents, read_resource

if TYPE_CHECKING:
    from kdist.cluster import Cluster


OLDEST = (1, 31)


def check_version(cluster: Cluster, version: dict[str, str]) -> Finding:
    """The cluster's Kubernetes, by what its server says of itself."""
    found = str(version.get("gitVersion"))
    digits = [
        "".join(filter(str.isdigit, str(version.get(part, "")))) for part in ("major", "minor")
    ]
    number = tuple(int(each) for each in digits if each)
    detail = f"Kubernetes {found} at {cluster.server} (context {cluster.context})"
    if number < OLDEST:
        return missing(
            "cluster",
            detail,
            (
                f"kdist needs Kubernetes {OLDEST[0]}.{OLDEST[1]}, whose Jobs have "
                "podFailurePolicy and successPolicy"
            ),
        )
    return ok("cluster", detail)


def check_identity(cluster: Cluster) -> Iterator[Finding]:
    """The user as the cluster knows it."""
    name = cluster.whoami()
    yield ok("you", f"{name or 'known to the server'}, namespace {cluster.namespace}")


def check_rights(cluster: Cluster) -> Iterator[Finding]:
    """The missing permissions of each group of commands."""
    served = cluster.kinds()
    groups: list[tuple[str, list[rbac.Right], str]] = [
        (need.commands, [each for each in need.rights if _is_served(each, served)], need.without)
        for need in rbac.NEEDS
    ]
    verbs = list(dict.fromkeys(verb for need in rbac.NEEDS for verb in need.workload.split()))
    for name in backends.NAMES:
        kind = (backends.get(name).api_version, backends.get(name).kind)
        if kind in served:
            rights = [rbac.Right(verb, *kind) for verb in verbs]
            groups.append((f"jobs as {kind[1]}", rights, "other kinds may be allowed"))
    gone = set(rbac.find_missing(cluster, [right for _, wanted, _ in groups for right in wanted]))
    incomplete = [
        (name, [str(each) for each in wanted if each in gone], without)
        for name, wanted, without in groups
        if wanted
    ]
    jobs = [each for each in incomplete if each[0].startswith("jobs as")]
    if not any(verbs for _, verbs, _ in jobs):
        kinds = ", ".join(name.removeprefix("jobs as ") for name, _, _ in jobs)
        yield ok("rights: jobs", f"every verb on {kinds}")
        incomplete = [each for each in incomplete if each not in jobs]
    for name, found, without in incomplete:
        title = f"rights: {name}"
        fix = rbac.advise(found, cluster.namespace)
        if not found:
            yield ok(title, "all verbs")
        elif without:
            yield note(title, f"not allowed: {', '.join(found)}; {without}", fix)
        else:
            yield missing(title, f"not allowed: {', '.join(found)}", fix)


def _is_served(right: rbac.Right, served: set[tuple[str, str]]) -> bool:
    """Whether the cluster serves the kind of the right in any version, or the kind is built in."""
    group = right.api_version.rpartition("/")[0]
    return (
        "." not in group
        or (group.endswith(".k8s.io") and not group.endswith("x-k8s.io"))
        or any(kind == right.kind and version.startswith(f"{group}/") for version, kind in served)
    )


def check_kinds(cluster: Cluster) -> Iterator[Finding]:
    """The workload kinds that the cluster supports, and the choice of `backend: auto`."""
    served = cluster.kinds()
    found: list[str] = []
    absent: list[str] = []
    for name in backends.NAMES:
        backend = backends.get(name)
        (found if (backend.api_version, backend.kind) in served else absent).append(name)
    chosen = backends.choose(served)
    yield ok("workload kinds", f"{', '.join(found)} (`backend: auto` takes {chosen})")
    if absent:
        yield note(
            "workload kinds",
            f"not installed: {', '.join(absent)}",
            "install their operators if your jobs use them",
        )


def check_operators(cluster: Cluster) -> Iterator[Finding]:
    """Whether the operator of each kind runs; without it nothing happens to objects."""
    served = {group_kind(*each) for each in cluster.kinds()}
    wanted = [each for each in operators.OPERATORS if each in served]
    if not wanted:
        return
    try:
        deployments = cluster.list("apps/v1", "Deployment", all_namespaces=True)
    except (ApiError, ApiNotFoundError) as error:
        yield unknown("operators", f"of {', '.join(kind for _, kind in wanted)}: {error}")
        return
    for each in wanted:
        kind, found = each[1], operators.find_deployment(deployments, each)
        title = f"operator of {kind}"
        if found is None:
            project = operators.OPERATORS[each].project
            yield note(
                title,
                "no deployment with its usual name was found",
                f"if nothing happens to {kind} objects, install {project}",
            )
            continue
        home, name = found["metadata"]["namespace"], found["metadata"]["name"]
        if operators.count_ready(found)[0]:
            yield ok(title, f"{home}/{name} is ready")
        else:
            taken = f"{home}/{name} is not ready: {kind} objects are accepted but nothing happens"
            yield missing(title, taken, f"kubectl -n {home} describe deployment {name}")


_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
# Parts of the names of provisioners whose volumes many nodes can write to.
_SHARED = (
    "nfs",
    "cephfs",
    "efs",
    "azurefile",
    "filestore",
    "lustre",
    "glusterfs",
    "weka",
    "beegfs",
    "juicefs",
    "gpfs",
    "smb",
)


def check_namespace(cluster: Cluster) -> Iterator[Finding]:
    """Whether the namespace exists, and its Pod Security level."""
    from kdist.deploy.admission import ENFORCE

    name = cluster.namespace
    try:
        found = cluster.get("v1", "Namespace", name)
    except ApiNotFoundError:
        yield missing("namespace", *no_namespace(name))
        return
    except ApiError as error:
        yield unknown("namespace", f"{name}: {error}")
        return
    level = documents.label(found, ENFORCE) or "enforces nothing"
    yield ok("namespace", f"{name}: Pod Security {level}, and kdist's pods meet `restricted`")


def check_pod_is_admitted(cluster: Cluster) -> Iterator[Finding]:
    """Try a small pod in a server-side dry run, which includes policies, quotas and webhooks."""
    try:
        cluster.send_create(make_pod(), dry_run=True)
    except ApiNotFoundError:
        return  # the namespace is missing, which another check reports
    except ApiError as error:
        if error.code == Code.FORBIDDEN:
            yield unknown(
                "pods",
                f"a dry run is not allowed: {error} (the workload's controller creates the pods)",
            )
        else:
            yield missing(
                "pods",
                f"a pod as kdist creates it is rejected: {error}",
                error.hint or "ask the cluster's administrator",
            )
        return
    yield ok("pods", "a restricted pod is admitted (dry run)")


def make_pod() -> dict[str, Any]:
    """The rendered pod of a small job."""
    from kdist.deploy.admission import make_trial_pod
    from kdist.render import Placement, find_pods, render
    from kdist.spec import TrainingJob, job_document

    document = job_document(
        "kdist-doctor",
        image="kdist-doctor:dry-run",
        resources={"cpu": "0.1", "memory": "64Mi"},
        train={"workload": "digits", "epochs": 1},
    )
    job = TrainingJob.model_validate(document, by_alias=True, by_name=False)
    objects = render(job, Placement("job", "c10d", "doctor"))
    pod = next(pod for each in objects for pod in find_pods(each.document))
    return make_trial_pod("kdist-doctor", pod)


def check_quota(cluster: Cluster) -> Iterator[Finding]:
    """Each quota of the namespace, and which resources are used up."""
    for quota in cluster.list("v1", "ResourceQuota"):
        status = quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        text = ", ".join(
            f"{key} {used.get(key, '0')} of {value}" for key, value in sorted(hard.items())
        )
        full = [
            key
            for key, value in hard.items()
            if str(used.get(key, "0")) == str(value) and str(value) != "0"
        ]
        name = f"quota {quota['metadata']['name']}"
        if full:
            yield note(
                name,
                f"{text}; used up: {', '.join(sorted(full))}",
                "end other jobs, or ask for more",
            )
        else:
            yield ok(name, text)


def check_queues(cluster: Cluster) -> Iterator[Finding]:
    """Kueue's queues that jobs of the namespace may name."""
    versions = sorted(version for version, kind in cluster.kinds() if kind == "LocalQueue")
    if not versions:
        return
    queues = cluster.list(versions[-1], "LocalQueue")
    if not queues:
        yield note(
            "queues",
            f"Kueue is installed, but namespace {cluster.namespace} has no LocalQueue",
            "leave out spec.queue, or create one",
        )
    for queue in queues:
        conditions = (queue.get("status") or {}).get("conditions") or []
        active: dict[str, Any] = next(
            (each for each in conditions if each.get("type") == "Active"), {}
        )
        name = f"queue {queue['metadata']['name']}"
        if active.get("status") == "False":
            yield note(
                name,
                f"is not active: {active.get('message', '')}",
                "jobs that name it wait until it is",
            )
        else:
            yield ok(name, f"of ClusterQueue {(queue.get('spec') or {}).get('clusterQueue')}")


def check_nodes(cluster: Cluster) -> Iterator[Finding]:
    """Ready nodes and their GPUs."""
    try:
        nodes = cluster.list("v1", "Node")
    except ApiError as error:
        yield unknown("nodes", f"GPUs cannot be counted: {error}")
        return
    ready = [
        node
        for node in nodes
        if documents.text(documents.condition(node, "Ready"), "status") == "True"
        and not documents.at(node, "spec", "unschedulable")
    ]
    if not ready:
        yield missing("nodes", f"none of {len(nodes)} is ready for pods", "kubectl get nodes")
        return
    yield ok("nodes", f"{len(ready)} of {len(nodes)} are ready for pods")
    gpus: dict[str, int] = {}
    for node in ready:
        for resource, count in ((node.get("status") or {}).get("allocatable") or {}).items():
            if resource.endswith("/gpu") and str(count).isdecimal() and int(count):
                gpus[resource] = gpus.get(resource, 0) + int(count)
    if gpus:
        yield ok(
            "GPUs", ", ".join(f"{count} {resource}" for resource, count in sorted(gpus.items()))
        )
    else:
        yield note(
            "GPUs",
            "no node offers any",
            "for jobs with resources.gpu, install the device plugin of your GPUs",
        )


def check_storage(cluster: Cluster) -> Iterator[Finding]:
    """Storage classes for checkpoint volumes."""
    classes = cluster.list("storage.k8s.io/v1", "StorageClass")
    if not classes:
        yield note(
            "storage", "there is no StorageClass", "name an existing claim: checkpoints: {claim: …}"
        )
        return
    default = [
        each["metadata"]["name"]
        for each in classes
        if ((each["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true")
    ]
    shared = [
        each["metadata"]["name"]
        for each in classes
        if any(part in str(each.get("provisioner")).lower() for part in _SHARED)
    ]
    names = ", ".join(each["metadata"]["name"] for each in classes)
    if default:
        yield ok("storage", f"classes {names}; default {default[0]}")
    else:
        yield note(
            "storage",
            f"classes {names}; none is the default",
            "name one: checkpoints: {size: …, class: …}",
        )
    if shared:
        yield ok("shared storage", f"{', '.join(shared)} can be written from many nodes")
    else:
        yield unknown(
            "shared storage",
            "whether a class offers ReadWriteMany is not known from their provisioners",
            "with ReadWriteOnce, checkpoints of several nodes need strategy ddp",
        )


def check_dns(cluster: Cluster) -> Iterator[Finding]:
    """The cluster's DNS, by which pods find each other."""
    try:
        slices = cluster.list(
            "discovery.k8s.io/v1",
            "EndpointSlice",
            namespace="kube-system",
            selector="kubernetes.io/service-name=kube-dns",
        )
    except ApiError as error:
        yield unknown("DNS", str(error))
        return
    endpoints = [each for found in slices for each in found.get("endpoints") or []]
    ready = [each for each in endpoints if (each.get("conditions") or {}).get("ready") is not False]
    if ready:
        yield ok("DNS", f"kube-dns has {len(ready)} ready endpoints")
    elif slices:
        yield missing(
            "DNS",
            "kube-dns has no ready endpoint: pods cannot find each other",
            "kubectl -n kube-system get pods",
        )
    else:
        yield unknown("DNS", "there is no kube-dns; the cluster may use another DNS server")


def check_training_jobs(cluster: Cluster) -> Iterator[Finding]:
    """How `kdist apply` sends a job, and whether a controller acts on the existing TrainingJobs."""
    title = "TrainingJobs"
    if not cluster.serves(*TRAINING_JOB):
        yield ok(title, "not served: `kdist apply` sends the objects of a job themselves")
        return
    wanted = [Right(verb, *TRAINING_JOB) for verb in ("get", "create", "patch")]
    lacking = [str(each) for each in rbac.find_missing(cluster, wanted)]
    if lacking:
        yield note(
            title,
            f"served, but not allowed: {', '.join(lacking)}; `kdist apply` sends the objects of a "
            "job themselves",
            rbac.advise(lacking, cluster.namespace),
        )
    else:
        yield ok(title, "`kdist apply` sends one, and kdist's controller creates the objects")
    now = time.time()
    states = {
        str(each["metadata"]["name"]): read_resource(each)
        for each in cluster.list_readable(*TRAINING_JOB)
    }
    silent = [name for name, state in states.items() if state.explain(now)[1] == "NoController"]
    if silent:
        yield missing(
            "controller of TrainingJobs",
            f"no controller acts on {', '.join(silent)}",
            CONTROLLER_FIX,
        )
    elif any(state.seen for state in states.values()):
        yield ok("controller of TrainingJobs", f"has acted on {len(states)} in this namespace")
