"""What belongs to a kind of workload: its sizes, limits and policies, and where its pods stand."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kdist.convert.draft import JobDraft
from kdist.convert.pod import LEFT, PodConverter, convert_labels, find_container
from kdist.convert.values import NEEDLESS, InputValue, ValueOutcome, settle
from kdist.manifest import group_kind
from kdist.spec.models import LONGEST_JOB_NAME

_SHARED: Final = {
    **{name: name for name in ("activeDeadlineSeconds", "suspend", "ttlSecondsAfterFinished")},
    **dict.fromkeys(("backoffLimit", "maxRestarts", "maxRetry"), "maxRestarts"),
    **dict.fromkeys(("priorityClass", "priorityClassName"), "priorityClass"),
}
"""Fields of the kinds, and the job's."""
_REASONS: Final = {
    **LEFT,
    "cleanPodPolicy": "pods that have ended stay for ttlSecondsAfterFinished",
    "metrics": "kdist has no autoscaler; one can scale the TrainingJob by its scale subresource",
    "network": "kdist renders the job's Service",
    "parallelism": "all nodes run at once",
    "plugins": "kdist's agents find each other, and set the variables of torchrun",
    "queue": "spec.queue is Kueue's; the how-to on queues has Volcano's",
    "serviceName": "kdist renders the job's Service",
    "successPolicy": "the job is done when all ranks are",
    "volumeClaimTemplates": "each pod has a claim of its own: share one, or use spec.checkpoints",
    **dict.fromkeys(("podManagementPolicy", "startupPolicy"), "all pods start at once"),
    **dict.fromkeys(
        ("failurePolicy", "podFailurePolicy", "policies"), "spec.restart says what a failure does"
    ),
    **dict.fromkeys(
        ("podSpecOverrides", "podTemplateOverrides", "runtimePatches"), "write it into podTemplate"
    ),
}
_NEEDLESS: Final = re.compile(
    "creationTimestamp|generation|managedFields|resourceVersion|selfLink|status|uid|rdzv.*|"
    "standalone|completionMode|selector|terminationMessage.*"
)
"""What the cluster writes, or kdist itself."""


class _Kind(NamedTuple):
    """Where a kind has its parts: paths with dots, and the first that is given of those with `|`.

    The workload itself is the only role unless `roles` has a list or a mapping of them. Numbers of
    pods are multiplied. `shared` has fields of `_SHARED`, and first the sizes of an elastic job.
    """

    backend: str
    roles: str = ""
    replicas: tuple[str, ...] = ("replicas",)
    template: str = "template"
    procs: str = ""
    shared: tuple[str, ...] = ("spec",)


_COUNT: Final = "spec.completions|spec.parallelism"
_JOB_COUNT: Final = "template.spec.completions|template.spec.parallelism"
_JOB_TEMPLATE: Final = "template.spec.template"
_POLICY: Final = "runtime.spec.mlPolicy"
KINDS: Final = {
    ("kubeflow.org", "PyTorchJob"): _Kind(
        backend="pytorchjob",
        roles="spec.pytorchReplicaSpecs",
        procs="spec.nprocPerNode|spec.elasticPolicy.nProcPerNode",
        shared=("spec.elasticPolicy", "spec.runPolicy", "spec.runPolicy.schedulingPolicy"),
    ),
    ("trainer.kubeflow.org", "TrainJob"): _Kind(
        backend="trainjob",
        roles="runtime.spec.template.spec.replicatedJobs",
        template=_JOB_TEMPLATE,
        procs=f"spec.trainer.numProcPerNode|{_POLICY}.torch.numProcPerNode",
        shared=(f"{_POLICY}.torch.elasticPolicy", "spec"),
    ),
    ("batch", "Job"): _Kind("job", "", (_COUNT,), "spec.template"),
    ("jobset.x-k8s.io", "JobSet"): _Kind(
        "jobset",
        "spec.replicatedJobs",
        ("replicas", _JOB_COUNT),
        _JOB_TEMPLATE,
        shared=("spec.failurePolicy", "spec"),
    ),
    ("apps", "StatefulSet"): _Kind("statefulset", "", ("spec.replicas",), "spec.template"),
    ("batch.volcano.sh", "Job"): _Kind("auto", "spec.tasks"),
}
"""The kinds that can be converted, by API group and kind."""


class _Role(NamedTuple):
    """Pods of one template."""

    value: InputValue
    replicas: list[InputValue]
    template: InputValue

    @property
    def nodes(self) -> int:
        total = 1
        for each in self.replicas:
            total *= each.number if each.text.isdigit() else 1
        return total

    @property
    def image(self) -> str:
        return find_container(self.template.get("spec")).get("image").text


def kind_of(root: InputValue) -> tuple[str, str]:
    """(API group, kind)."""
    return group_kind(root.get("apiVersion").text, root.get("kind").text)


def job_name(text: str) -> str:
    """A name that kdist takes, close to a text."""
    name = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".rstrip("-")
    return name[: LONGEST_JOB_NAME - 4].rstrip("-")  # room for the index of a node


def convert_workload(root: InputValue) -> JobDraft:
    """The job of a workload, as far as it goes. Under `runtime` a TrainJob has its runtime."""
    kind, draft, metadata = KINDS[kind_of(root)], JobDraft(), root.get("metadata")
    named = metadata.get("name") or metadata.get("generateName")
    draft.set(("metadata", "name"), job_name(named.text), named)
    if job_name(named.text) != named.text:
        named.change(f"the job is called {job_name(named.text)}")
    root.get("apiVersion").keep("apiVersion")
    draft.set("backend", kind.backend, root.get("kind"))
    if namespace := metadata.get("namespace"):
        draft.set(("metadata", "namespace"), namespace.text, namespace)
    convert_labels(draft, metadata, "metadata")
    roles = _list_roles(root, kind)
    main = max(reversed(roles), key=lambda each: (bool(each.template), each.nodes))
    alike = [each for each in roles if each.image == main.image]
    nodes = sum(each.nodes for each in alike)
    procs = _find(root, kind.procs)
    count = procs.number or ("auto" if kind.procs else 1)
    lost = root.get("spec.volumeClaimTemplates").below()
    volumes = [each.get("metadata.name").text for each in lost]
    pod, trainer = main.template.get("spec"), root.get("spec.trainer")
    PodConverter(draft, pod, trainer, volumes).convert(nodes, count)
    convert_labels(draft, main.template.get("metadata"), "spec", "podTemplate", "metadata")
    shared = [root.get(each) for each in kind.shared]
    sizes = [shared[0].get(f"{end}{of}") for of in ("Replicas", "Nodes") for end in ("min", "max")]
    least, most = (max(each.number for each in pair) for pair in (sizes[::2], sizes[1::2]))
    replicas = [number for role in alike for number in role.replicas]
    if 0 < least < most:
        draft.set("nodes", {"min": least, "max": most}, *sizes)
        settle(replicas, ValueOutcome(NEEDLESS, "the sizes of the elastic job replace it"))
    else:
        draft.set("nodes", nodes, *(each for each in replicas if each.text.isdigit()))
        for each in (each for each in replicas if each and not each.text.isdigit()):
            each.leave("is not a whole number: set spec.nodes")
            draft.is_complete = False
    if procs and draft.get("procsPerNode") not in (None, count):
        procs.leave("the command starts another number of ranks on each node")
    elif re.fullmatch("[0-9]+|auto|gpu", procs.text):
        draft.document["spec"]["procsPerNode"] = count
        procs.keep("spec.procsPerNode")
    if draft.get("procsPerNode") == "auto" and not draft.get("resources.gpu"):
        root.change("starts one rank on each node without GPUs: set spec.procsPerNode")
    if kind.template == _JOB_TEMPLATE:
        shared += [each.value.get("template.spec") for each in roles]
    for each in [each for place in shared for each in place.below() if each]:
        target = _SHARED.get(each.key, "")
        if target == "maxRestarts" and draft.get(target) is None:
            each.change("counts for the whole job, and a later checkpoint resets the count")
        if target:
            draft.set(target, each.value(), each)
    if kind.backend == "trainjob":
        _convert_trainjob(draft, root)
    for role in roles:
        role.value.get("name").leave("all nodes are alike", needless=True)
        if not role.template and kind.backend != "trainjob":
            role.value.change(f"has no {kind.template}: its pods are not described")
            draft.is_complete = False
        elif role not in alike:
            role.value.leave("has another image, and all nodes of a job are alike")
        elif role is not main:
            _compare(role, main)
    return draft


def _find(place: InputValue, paths: str) -> InputValue:
    """The first value of some paths; those after it are left out."""
    given = [each for each in map(place.get, paths.split("|")) if each]
    for each in given[1:]:
        same = each.text == given[0].text
        each.leave(f"line {given[0].mark.line} replaces it", needless=same)
    return given[0] if given else place.get("none")


def _list_roles(root: InputValue, kind: _Kind) -> list[_Role]:
    roles = [
        _Role(each, [_find(each, path) for path in kind.replicas], each.get(kind.template))
        for each in (root.get(kind.roles).below() if kind.roles else [root])
    ]
    if kind.backend == "trainjob":
        numbers = [_find(root, f"spec.trainer.numNodes|{_POLICY}.numNodes")]
        nodes = [each for each in roles if each.value.get("name").text == "node"] or roles[-1:]
        for each in roles:
            if each not in nodes:
                each.value.leave("kdist fetches data and weights itself: spec.data")
        nodes = nodes or [_Role(root.get("runtime"), [], root.get("runtime.template"))]
        roles = [each._replace(replicas=numbers) for each in nodes[:1]]
    place = root.get(kind.roles)
    return roles or [_Role(place, [], place.get(kind.template))]


def _convert_trainjob(draft: JobDraft, root: InputValue) -> None:
    """The runtime of a TrainJob, and what it fetches."""
    why = "kdist renders the job's runtime"
    root.get("spec.runtimeRef").keep(why)
    for name in ("apiVersion", "kind", "metadata"):
        root.get(f"runtime.{name}").leave(why, needless=True)
    if not root.get("runtime"):
        root.get("spec.runtimeRef").change("its image, pods and sizes are not in the file")
    for name in ("dataset", "model"):
        source = root.get(f"spec.initializer.{name}")
        uri, secret = source.get("storageUri"), source.get("secretRef.name")
        is_set = name == "dataset" and re.fullmatch("hf://[^/]+/[^/]+", uri.text)
        url = uri.text.replace("hf://", "hf://datasets/") if is_set else uri.text
        found = {"url": url, "mountPath": f"/workspace/{name}"}
        found |= {"secret": secret.text} if secret else {}
        if uri:
            draft.add("data", found, uri, secret)
            uri.change("is fetched by each node before the training starts, and is read-only")


def _compare(role: _Role, main: _Role) -> None:
    """Say what of another template than the job's is lost."""
    values = {each.path[len(main.template.path) :]: each for each in main.template.leaves()}
    for each in role.template.leaves():
        other = values.get(each.path[len(role.template.path) :], main.template)
        if other.value() == each.value() and (outcome := other.outcome) is not None:
            settle([each], outcome)
        elif other.value() != each.value():
            each.leave(f"all nodes have what line {other.mark.line} has in its place")
    find_container(role.template.get("spec")).get("name").keep("the container trainer")


def settle_rest(value: InputValue) -> None:
    """Leave out what nothing has read, each time the largest part of which that is true."""
    paths = [path for path in value.outcomes.found if path[: len(value.path)] == value.path]
    if value.outcome is None and paths:
        for each in value.below():
            settle_rest(each)
    elif value.outcome is None:
        names = [str(part) for part in reversed(value.path)]
        reasons = [_REASONS[each] for each in names if each in _REASONS]
        leaves = [each.node for each in value.leaves()]
        empty = all(each is None or each.scalar is None for each in leaves)
        needless = empty or any(map(_NEEDLESS.fullmatch, names))
        why = "is not needed" if needless else [*reasons, "kdist has no such field"][0]
        value.leave(why, needless=needless)
