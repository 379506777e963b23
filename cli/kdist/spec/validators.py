"""The rules across several fields of a job; those within `nodes` or `train` are in
`kdist_trainer.config`, which the trainer reads too.

Every rule names the fields it has read: a problem points at one of them, and is not reported if one
of them is itself wrong.

Among them are the rules of the parallel strategies: over which numbers of nodes and ranks each can
be spread, and which of the shipped workloads it can train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from kdist.spec.models import LONGEST_POD_NAME, Violation, jobset_pod_name
from kdist.spec.sources import INIT_MOUNT, check_credentials, check_sources, list_unpinned
from kdist_trainer.config.workload_options import OPTIONS, GptOptions, explain, names_of
from kdist_trainer.formats import RUN

if TYPE_CHECKING:
    from kdist.spec.training_job import Spec, TrainingJob


SHIPPED_WORKLOADS = tuple(OPTIONS)
MODEL_PARALLEL = ("tensor", "pipeline")
"""Strategies in which several ranks share one copy of the model."""
TENSOR_WORKLOADS = ("gpt",)
"""Shipped workloads that have a tensor plan."""


def _one_process(spec: Spec) -> Iterator[Violation]:
    """`data_parallel` is a single process with all GPUs; nothing averages gradients across
    processes.
    """
    if spec.train is None or spec.train.strategy != "data_parallel":
        return
    if spec.nodes.max > 1:
        message = (
            "must be 1 with strategy data_parallel, which is one process; ddp supports several "
            f"nodes, found {spec.nodes.max}"
        )
        yield Violation(message, "nodes.max", ("nodes.max", "train.strategy"))
    if spec.procs_per_node not in ("auto", 1):
        message = (
            "must be 1 with strategy data_parallel, which is one process, found "
            f"{spec.procs_per_node}"
        )
        yield Violation(message, "procsPerNode", ("procsPerNode", "train.strategy"))


def _replicas(spec: Spec) -> Iterator[Violation]:
    """Every world size of the job must be a whole number of model replicas, each within a node or
    on whole nodes.
    """
    train = spec.train
    if train is None or (train.strategy not in MODEL_PARALLEL and train.model_parallel is None):
        return
    ways, strategy = train.model_parallel, train.strategy
    fields_read = ("train.modelParallel", "train.strategy")
    if strategy not in MODEL_PARALLEL:
        message = (
            f"must be left out with strategy {strategy}, which has no ranks that share a copy "
            "of the model"
        )
        yield Violation(message, "train.modelParallel", fields_read)
        return
    if ways is None:
        message = f"needs modelParallel with {strategy}: how many ranks share one copy of the model"
        yield Violation(message, "train.strategy", fields_read)
        return
    per_node = (spec.resources.gpu or 1) if spec.procs_per_node == "auto" else spec.procs_per_node
    fields = ("train.modelParallel", "procsPerNode", "resources.gpu", "nodes.min", "nodes.max")
    nodes = spec.nodes
    if per_node % ways == 0:
        return  # any number of nodes fits
    if ways % per_node:
        message = (
            f"must be a multiple of modelParallel, {ways}, so that a copy of the model is "
            f"within one node, found {per_node}"
        )
        yield Violation(
            message,
            "procsPerNode" if spec.procs_per_node != "auto" else "train.modelParallel",
            fields,
        )
    elif nodes.min != nodes.max:
        message = (
            f"must be one number: a copy of the model takes {ways // per_node} nodes "
            f"(modelParallel {ways}, procsPerNode "
            f"{per_node}), and not every size in between is a multiple; procsPerNode: {ways} "
            "keeps the job elastic"
        )
        yield Violation(message, "nodes", (*fields, "nodes"))
    elif nodes.max * per_node % ways:
        share = ways // per_node
        message = (
            f"must be a multiple of {share}, the nodes that share one copy of the model, "
            f"found {nodes.max}"
        )
        yield Violation(message, "nodes", (*fields, "nodes"))


def _tensor_plan(spec: Spec) -> Iterator[Violation]:
    """A shipped workload must have a tensor plan; others are checked when the job starts."""
    train = spec.train
    if train is None or train.strategy != "tensor" or train.workload not in SHIPPED_WORKLOADS:
        return
    fields_read = ("train.strategy", "train.workload", "train.modelParallel")
    if train.workload not in TENSOR_WORKLOADS:
        message = f"must not be tensor: {train.workload} has no tensor plan; use fsdp"
        yield Violation(message, "train.strategy", fields_read)
        return
    heads = train.options.get("heads", GptOptions().heads)
    if train.model_parallel is not None and isinstance(heads, int) and heads % train.model_parallel:
        message = (
            f"must divide the {heads} heads of gpt's attention (options.heads), found "
            f"{train.model_parallel}"
        )
        yield Violation(message, "train.modelParallel", (*fields_read, "train.options"))


def _stages(spec: Spec) -> Iterator[Violation]:
    """A shipped workload's model must have a part with weights for each stage; other workloads are
    checked when the job starts.
    """
    train = spec.train
    if (
        train is None
        or train.strategy != "pipeline"
        or train.workload not in SHIPPED_WORKLOADS
        or not train.model_parallel
    ):
        return
    layers = train.options.get("layers", GptOptions().layers)
    parts = 4 if train.workload == "digits" else layers + 2 if isinstance(layers, int) else None
    if parts is not None and train.model_parallel > parts:
        message = (
            f"must be at most {parts}, the parts of {train.workload}'s model, found "
            f"{train.model_parallel}"
        )
        yield Violation(
            message,
            "train.modelParallel",
            ("train.modelParallel", "train.strategy", "train.options"),
        )


def check(spec: Spec) -> Iterator[Violation]:
    """Yield the violations of a job's spec."""
    yield from _train_or_script(spec)
    yield from _size(spec)
    yield from _restart_time(spec)
    yield from _restart_rules(spec)
    yield from _shards(spec)
    yield from _devices(spec)
    yield from _one_process(spec)
    yield from _replicas(spec)
    yield from _tensor_plan(spec)
    yield from _stages(spec)
    yield from _unique_names(spec)
    yield from check_credentials(spec)
    yield from check_sources(spec)
    yield from _standby_nodes(spec)
    yield from _own_mounts(spec)
    yield from _pod_keys(spec)
    yield from _workload(spec)
    yield from _import_path(spec)


def _import_path(spec: Spec) -> Iterator[Violation]:
    """What pods install is found by a variable that a job may set otherwise."""
    for index, variable in enumerate(spec.env):
        if spec.install is not None and variable.name == "PYTHONPATH":
            field = f"env.{index}.name"
            message = "`PYTHONPATH` is set by kdist where install is given: put modules into code"
            yield Violation(message, field, (field, "install"))


# In every namespace there is such a service account, and in `default` the API server's Service.
TAKEN_NAMES = ("default", "kubernetes")
# Names of further objects that a job, or the controller of its kind, creates.
DERIVED_NAME = re.compile(
    r"-(rendezvous|checkpoints|(code|train)-[0-9a-f]{10}|node-\d+|worker-\d+|master-\d+)$"
)
OWN_KEYS = "kdist.dev/"
"""How the labels and annotations begin that only kdist writes."""


def check_job(job: TrainingJob) -> Iterator[Violation]:
    """Every broken rule that ties a job's name to the rest of it."""
    name, nodes = job.metadata.name, job.spec.nodes.max
    fields_read = ("metadata.name",)
    if name in TAKEN_NAMES:
        yield Violation(
            f"must not be `{name}`: every namespace already has an object of that name",
            "metadata.name",
            fields_read,
        )
    if found := DERIVED_NAME.search(name):
        owner = name[: found.start()]
        message = (
            f"must not end with `{found[0]}`: a job `{owner}` would create an object of this name"
        )
        yield Violation(message, "metadata.name", fields_read)
    most = LONGEST_POD_NAME - len(jobset_pod_name("", nodes - 1))
    if len(name) > most:
        message = (
            f"must be at most {most} characters with {nodes} nodes, as a JobSet names its pods "
            f"{jobset_pod_name('NAME', 'INDEX', 'XXXXX')}"
        )
        yield Violation(
            f"{message}, found {len(name)}", "metadata.name", (*fields_read, "spec.nodes.max")
        )
    run = job.metadata.annotations.get(RUN)
    if run is not None and not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", run):
        message = (
            f"{RUN} must be up to 63 letters, digits, `-`, `_` and `.`, beginning and ending "
            "with a letter or digit"
        )
        yield Violation(message, "metadata.annotations", ("metadata.annotations",))
    yield from _own_keys("metadata.labels", job.metadata.labels)
    yield from _own_keys("metadata.annotations", job.metadata.annotations)


def _own_keys(field: str, entries: object, at: str = "") -> Iterator[Violation]:
    """No label or annotation of the user's is one by which kdist knows its objects."""
    for key in entries if isinstance(entries, dict) else ():
        if str(key).startswith(OWN_KEYS) and not (field == "metadata.annotations" and key == RUN):
            place = at or field
            where = f" in {field}" if at else ""
            yield Violation(
                f"must not have `{key}`{where}: what begins with {OWN_KEYS} is written by kdist "
                "itself",
                place,
                (place,),
            )


def list_warnings(spec: Spec) -> list[str]:
    """What is valid, and may surprise later."""
    return [*list_unpinned(spec), *_describe_small_pods(spec), *_describe_node_folder(spec)]


def _describe_node_folder(spec: Spec) -> Iterator[str]:
    cache = None if spec.install is None else spec.install.cache
    if cache is not None and cache.host_path is not None:
        yield (
            "spec.install.cache.hostPath: namespaces that enforce Pod Security `baseline` or "
            "`restricted` reject the pods: use a claim there"
        )


def _describe_small_pods(spec: Spec) -> Iterator[str]:
    """A device that `podTemplate` requests says nothing of the CPU and memory that go with it."""
    named, devices = set(spec.resources.model_fields_set), list[str]()
    for container in _overlay_containers(spec):
        resources = container.get("resources") if container.get("name") == TRAINER else None
        for kind in ("limits", "requests", "claims"):
            found = resources.get(kind) if isinstance(resources, dict) else None
            if isinstance(found, dict):
                named |= set(found)
                devices += [name for name in found if "/" in name]
            elif found:
                devices.append("claims")
    missing = [name for name in ("cpu", "memory") if name not in named]
    if devices and missing:
        given = " and ".join(f"{name} {getattr(spec.resources, name)}" for name in missing)
        yield (
            f"podTemplate requests {devices[0]}, and each pod has only {given}, which is meant for "
            "jobs without GPUs: write what it needs, such as spec.resources: {cpu: 8, memory: 32Gi}"
        )


def _overlay_containers(spec: Spec) -> list[dict[str, Any]]:
    pod = spec.pod_template.get("spec")
    found = pod.get("containers") if isinstance(pod, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _pod_keys(spec: Spec) -> Iterator[Violation]:
    found = spec.pod_template.get("metadata")
    metadata = found if isinstance(found, dict) else {}
    for kind in ("labels", "annotations"):
        yield from _own_keys(f"podTemplate.metadata.{kind}", metadata.get(kind), "podTemplate")
    if metadata.get("finalizers"):
        message = (
            "must not have metadata.finalizers: its pods, and with them the namespace, could not "
            "be deleted until somebody removes them from each pod"
        )
        yield Violation(message, "podTemplate", ("podTemplate",))


CHECKPOINTS_MOUNT = "/checkpoints"
SCRATCH_MOUNT = "/run/kdist"
CACHE_MOUNT: Final = "/kdist/packages-cache"
"""The installed packages of `spec.install.cache`."""
TRAINER: Final = "trainer"
"""The container of the ranks in `spec.podTemplate`."""
OWN_FOLDERS: Final = (
    CHECKPOINTS_MOUNT,
    "/code",
    "/etc/kdist",
    SCRATCH_MOUNT,
    INIT_MOUNT,
    "/tmp",  # noqa: S108 - in the pod
    "/dev/shm",  # noqa: S108 - in the pod
    "/var/run/secrets/kdist",
)
INSTALL_FOLDERS: Final = ("/packages", CACHE_MOUNT)
"""What `spec.install` mounts besides."""
OWN_VOLUMES: Final = (
    *("checkpoints", "code", "config", "init", "install", "packages", "packages-cache"),
    *("scratch", "shm", "tmp", "token", "wheels"),
)
"""Names of the volumes of pods, besides those of spec.data."""


def _own_mounts(spec: Spec) -> Iterator[Violation]:
    """Neither data nor the pod template's overlay is mounted where kdist mounts something."""
    installed = () if spec.install is None else INSTALL_FOLDERS
    for index, data in enumerate(spec.data):
        if data.mount_path.rstrip("/") in installed:
            field = f"data.{index}.mountPath"
            yield Violation("must not be where spec.install puts packages", field, (field,))
    for container in _overlay_containers(spec):
        mounts = container.get("volumeMounts") if container.get("name") == TRAINER else None
        for mount in mounts if isinstance(mounts, list) else ():
            path = mount.get("mountPath") if isinstance(mount, dict) and "name" in mount else None
            if isinstance(path, str) and path.rstrip("/") in OWN_FOLDERS + installed:
                yield Violation(
                    f"must not mount {path}, where kdist itself mounts a volume",
                    "podTemplate",
                    ("podTemplate",),
                )


def _train_or_script(spec: Spec) -> Iterator[Violation]:
    if spec.train is not None and spec.script is not None:
        yield Violation(
            "train and script exclude each other; keep one", "script", ("script", "train")
        )
    if spec.train is None and spec.script is None:
        yield Violation(
            "needs train (the managed loop) or script (a torchrun script)", "", ("train", "script")
        )
    check = None if spec.preflight is None else spec.preflight.all_reduce
    if check is not None and spec.script is not None:
        yield Violation(
            "belongs to train: a script creates its own process group",
            "preflight.allReduce",
            ("preflight", "script"),
        )


def _size(spec: Spec) -> Iterator[Violation]:
    nodes, replicas = spec.nodes, spec.replicas
    if replicas is not None and not nodes.min <= replicas <= nodes.max:
        found = f"found {replicas}"
        limits = (
            f"{nodes.min}, as nodes is one number: change nodes, or make it {{min, max}}"
            if nodes.min == nodes.max
            else f"from nodes.min, {nodes.min}, to nodes.max, {nodes.max}"
        )
        yield Violation(
            f"must be {limits}, {found}", "replicas", ("replicas", "nodes.min", "nodes.max")
        )


def _restart_time(spec: Spec) -> Iterator[Violation]:
    """A time with the right characters may still be none, such as the 31st of February."""
    if spec.restarted_at is not None:
        try:
            datetime.fromisoformat(spec.restarted_at)
        except ValueError as error:
            yield Violation(f"must be a time: {error}", "restartedAt", ("restartedAt",))


def _restart_rules(spec: Spec) -> Iterator[Violation]:
    """Every rule can match: a failure that no rule before it matches."""
    codes, errors = set[int](), set[str]()
    for index, rule in enumerate(spec.restart.rules if spec.restart is not None else ()):
        message, condition = "", "onErrors" if rule.on_exit_codes is None else "onExitCodes"
        if rule.on_exit_codes is not None:
            if spec.script is None:
                message = "belongs to script: ranks of train exit with kdist's own codes"
            elif codes >= rule.on_exit_codes.codes:
                message = "can never match: earlier rules match all of its exit codes"
            codes |= rule.on_exit_codes.codes
        elif spec.script is not None and 1 in codes:
            message = "can never match: an earlier rule matches exit code 1, that of every error"
        elif errors.issuperset(rule.on_errors or ()):
            message = "can never match: earlier rules match all of its errors"
        errors.update(rule.on_errors or ())
        if message:
            field = f"restart.rules.{index}.{condition}"
            yield Violation(message, field, (field, "script"))


def _shards(spec: Spec) -> Iterator[Violation]:
    """A batch is dealt to shards and the shards to ranks, so none may be left empty at the largest
    world size.
    """
    train = spec.train
    if train is None:
        return
    per_node = 1 if spec.procs_per_node == "auto" else spec.procs_per_node
    ways = train.model_parallel or 1
    world = max(1, spec.nodes.max * per_node // ways)
    ranks = f"{spec.nodes.max} x {per_node} ranks" if ways == 1 else f"{world} copies of the model"
    world_fields = ("nodes.max", "procsPerNode", "train.modelParallel")
    if train.virtual_shards is not None and train.virtual_shards < world:
        yield Violation(
            f"must be at least {world}, a shard for each of {ranks}, found {train.virtual_shards}",
            "train.virtualShards",
            ("train.virtualShards", *world_fields),
        )
    if train.virtual_shards is not None and train.global_batch < train.virtual_shards:
        yield Violation(
            f"must be at least {train.virtual_shards}, a sample for each virtual shard, "
            f"found {train.global_batch}",
            "train.globalBatch",
            ("train.globalBatch", "train.virtualShards"),
        )
    elif train.global_batch < world:
        yield Violation(
            f"must be at least {world}, a sample for each of {ranks}, found {train.global_batch}",
            "train.globalBatch",
            ("train.globalBatch", *world_fields),
        )


def _devices(spec: Spec) -> Iterator[Violation]:
    gpus, procs = spec.resources.gpu, spec.procs_per_node
    if gpus and procs != "auto" and procs > gpus:
        message = (
            f"must be at most {gpus}, the GPUs of a node, as NCCL takes one rank per GPU, "
            f"found {procs}"
        )
        yield Violation(message, "procsPerNode", ("procsPerNode", "resources.gpu"))


def _unique_names(spec: Spec) -> Iterator[Violation]:
    """Names of variables are unique, and mounts of data sets do not overlap."""
    names: dict[str, int] = {}
    for index, variable in enumerate(spec.env):
        field = f"env.{index}.name"
        if variable.name in names:
            yield Violation(
                f"`{variable.name}` is already given at spec.env[{names[variable.name]}]",
                field,
                (field,),
            )
        names.setdefault(variable.name, index)
    paths: dict[str, int] = {}
    for index, data in enumerate(spec.data):
        field, path = f"data.{index}.mountPath", data.mount_path
        for other, first in paths.items():
            if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
                yield Violation(
                    f"`{path}` overlaps `{other}` of spec.data[{first}]", field, (field,)
                )
        paths.setdefault(path, index)


def _standby_nodes(spec: Spec) -> Iterator[Violation]:
    """Pods beyond the number that a worker group may have exist with an Indexed Job only."""
    if spec.nodes.standby and spec.backend not in ("auto", "job"):
        yield Violation(
            f"must be 0 with backend {spec.backend}: only backend: job starts a pod more than the "
            "ranks need",
            "nodes.standby",
            ("nodes.standby", "backend"),
        )


def _workload(spec: Spec) -> Iterator[Violation]:
    if spec.train is None:
        return
    if model := OPTIONS.get(spec.train.workload):
        try:
            model.model_validate(spec.train.options)
        except ValidationError as error:
            for at, words in explain(model, error):
                name, names = at.rpartition(".")[2], names_of(model)
                near = "" if name in names else _find_nearest(name, names)
                yield Violation(words, at, ("train.workload", at), near)
        return
    module, colon, name = spec.train.workload.partition(":")
    if colon and all(part.isidentifier() for part in module.split(".")) and name.isidentifier():
        return
    yield Violation(
        f"must be {' or '.join(SHIPPED_WORKLOADS)}, or module:Class",
        "train.workload",
        ("train.workload",),
        _find_nearest(spec.train.workload.lower(), SHIPPED_WORKLOADS),
    )


def _find_nearest(word: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches  # a valid job needs none

    return "".join(get_close_matches(word[:64], names, n=1))
