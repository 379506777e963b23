"""Computes the values for the templates: the job, names and labels of its objects, the placement,
and the files of `spec.code` as the content of a ConfigMap. Quantities are written as the API server
returns them (`0.2` as `200m`), so that a second apply changes nothing. Also renders the pod
template, with `spec.podTemplate` merged into it last.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from decimal import ROUND_CEILING, Decimal
from hashlib import sha256
from typing import Any, Final

from kdist import backends
from kdist.backends import Placement
from kdist.errors import KdistError
from kdist.manifest import (
    AVOID_LABEL,
    CODE_BYTES,
    CONFIG_MAP_BYTES,
    JOB_LABEL,
    QUEUE_LABEL,
    RENDEZVOUS_SUFFIX,
    own_labels,
)
from kdist.render.overlay import merge_overlay
from kdist.render.storage import find_access, follow_training, list_fetches, list_variables
from kdist.render.templates import TracedValue, read_template, trace_value
from kdist.spec import INIT_MOUNT, Exit, TrainingJob, list_sources
from kdist.status import FETCHER, PACKAGES
from kdist_trainer.formats import METRICS_PORT
from kdist_trainer.formats.json_text import encode_json

_STEPS: Final = {1024: ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1000: ("k", "M", "G", "T", "P", "E")}


def cpu(text: str) -> str:
    """Normalize cores (`1.5`) or millicores (`1500m`); rounds up to whole millicores."""
    exact = Decimal(text.removesuffix("m")) * (1 if text.endswith("m") else 1000)
    millis = int(exact.to_integral_value(ROUND_CEILING))
    return f"{millis}m" if millis % 1000 else str(millis // 1000)


def storage(text: str) -> str:
    """Normalize a number of bytes to the largest unit that gives a whole number."""
    digits = text.rstrip("KMGTPEik")
    number, unit = int(digits), text[len(digits) :]
    for step, units in _STEPS.items():
        if unit in units:
            index = units.index(unit)
            while number % step == 0 and index + 1 < len(units):
                number, index = number // step, index + 1
            return f"{number}{units[index]}"
    return text


def rewrite(document: dict[str, Any]) -> dict[str, Any]:
    """The job file's document with normalized quantities; the rest is shared with the original."""
    spec = dict(document["spec"])
    wanted = spec["resources"]
    spec["resources"] = {**wanted, "cpu": cpu(wanted["cpu"]), "memory": storage(wanted["memory"])}
    if spec["checkpoints"] and spec["checkpoints"]["size"]:
        spec["checkpoints"] = {**spec["checkpoints"], "size": storage(spec["checkpoints"]["size"])}
    return {**document, "spec": spec}


_LARGEST_SHOWN: Final = 3  # files named in an error


def pack(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Values for templates: `digest`, `data` (text), `binary` (base64) and `items` (key, path), in
    deterministic order.

    Raises `KdistError` with the largest files if they do not fit into a ConfigMap.
    """
    check_size({name: len(content) for name, content in files.items()})
    data: dict[str, str] = {}
    binary: dict[str, str] = {}
    items = []
    whole = sha256()
    for index, (path, content) in enumerate(sorted(files.items())):
        key = f"{index:04d}-{re.sub(r'[^-._a-zA-Z0-9]', '_', path)[-200:]}"
        items.append({"key": key, "path": path})
        whole.update(f"{path}\0{len(content)}\0".encode() + content)
        try:
            data[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = b64encode(content).decode()
    return {"digest": whole.hexdigest()[:10], "data": data, "binary": binary, "items": items}


def check_size(sizes: Mapping[str, int]) -> None:
    """Raise `KdistError` with the largest of these files if a ConfigMap cannot hold them."""
    total = sum(sizes.values())
    if total > CONFIG_MAP_BYTES:
        largest = sorted(sizes, key=lambda path: (-sizes[path], path))[:_LARGEST_SHOWN]
        named = ", ".join(f"{path} ({sizes[path] / 1024:.0f} KiB)" for path in largest)
        raise KdistError(
            f"spec.code has {total / 1024:.0f} KiB, but a ConfigMap has at most "
            f"{CONFIG_MAP_BYTES // 1024} KiB: {named}",
            hint="with checkpoints on a claim or in a bucket (spec.checkpoints) `kdist apply` sends"
            f" up to {CODE_BYTES >> 30} GiB there; else put data and weights on a claim "
            "(spec.data), large code into the image",
        )


RENDEZVOUS_PORT: Final = 29_400
_NOT_IN_PODS: Final = (
    *("backend", "code", "install", "nodes", "queue", "replicas", "restartedAt", "suspend"),
    "ttlSecondsAfterFinished",
)
"""Fields of the job that do not change its pods, or not only by their own value."""


def collect(job: TrainingJob, placement: Placement | None) -> dict[str, Any]:
    """The values for all templates; without a placement only those for a local run's ConfigMap."""
    document = job.model_dump(mode="json", by_alias=True)
    values: dict[str, Any] = {
        "name": TracedValue(job.metadata.name, "metadata.name"),
        "metadata": _metadata(job),
        "placement": placement,
        "train_json": trace_value(_write(job.to_train_config().to_document()), "spec"),
        "notes": (  # comments for users who find the object on a cluster
            f"The training job {job.metadata.name}, rendered by kdist from its job.yaml; change it "
            "there and apply it again.\n"
            "train.json is read by every agent and every rank of the job: the same bytes "
            "everywhere, every default written out.\n"
        ),
    }
    if placement is None:
        return values
    code_map = None if job.spec.code is None else job.spec.code.config_map
    backend, written = backends.get(placement.backend), rewrite(document)
    settings = job.to_train_config().to_document()
    nodes, name, queue = settings.pop("nodes"), job.metadata.name, job.spec.queue
    # how often agents, pods and Jobs may start again
    pods = backends.backoff_limit(job)
    limit = job.spec.active_deadline_seconds
    if limit is not None:
        limit += job.spec.rendezvous_timeout_seconds + job.spec.termination_grace_period_seconds
    limits = {"restart": job.restart_limit, "backoff": pods, "job_backoff": 100 * pods}
    return values | {
        "fetchers": [PACKAGES] * (job.spec.install is not None)
        + [f"{FETCHER}{source.name}" for source in list_sources(job.spec) if source.mount],
        "train_json": trace_value(_write(settings), "spec"),
        "train_digest": sha256(_write(settings).encode()).hexdigest()[:10],
        "nodes_json": trace_value(_write(nodes), "spec.nodes"),
        "checkpoint_folder": job.checkpoint_folder,
        "checkpoint_root": job.checkpoint_root,
        "store": find_access(job),
        "backend": backend,
        "field": _field(written),
        "spec": written["spec"],
        "job_json": trace_value(_write(document), "spec"),
        "elastic": backends.is_elastic(job),
        "standby": job.spec.nodes.standby,
        "pods": TracedValue(
            job.spec.nodes.max + job.spec.nodes.standby,
            "spec.nodes" if job.spec.nodes.standby else "spec.nodes.max",
        ),
        "replaced_whole": "jobset" in backend.parts and not backends.is_elastic(job),
        "procs": TracedValue(str(job.spec.procs_per_node), "spec.procsPerNode"),
        **{f"{each}_limit": TracedValue(n, "spec.maxRestarts") for each, n in limits.items()},
        "backstop_seconds": TracedValue(limit, "spec"),
        "permanent_codes": backends.list_permanent_codes(),
        "stopped_code": int(Exit.STOPPED),
        "rendezvous": placement.rendezvous,
        "rendezvous_suffix": RENDEZVOUS_SUFFIX,
        "exchange_secret": name_exchange_secret(job, placement),
        "host": f"{backend.host.format(name=name)}:{RENDEZVOUS_PORT}",
        "metrics_port": METRICS_PORT,
        "selector": {JOB_LABEL: trace_value(name, "metadata.name")},
        "avoid_labels": {AVOID_LABEL: trace_value(name, "metadata.name")},
        "workload_labels": {QUEUE_LABEL: TracedValue(queue, "spec.queue")} if queue else {},
        "workload_annotations": {},
        "run_id": placement.run_id,
        "code_map": code_map and TracedValue(code_map, "spec.code.configMap"),
        "code_volume": _code_volume(job),
        "code_items": [] if not code_map else document["spec"]["code"].get("items", []),
        "guarded": min(job.spec.nodes.min, job.spec.nodes.max - 1),
    }


def _code_volume(job: TrainingJob) -> str | None:
    """The pods' volume with code that is on a claim; that of checkpoints or data if these are on
    the same claim, since many kubelets never start a pod with two volumes of one claim.
    """
    claim = None if job.spec.code is None else job.spec.code.claim
    known = {data.claim: f"data-{index}" for index, data in enumerate(job.spec.data)}
    known |= {job.checkpoint_claim: "checkpoints"}
    return None if claim is None else known.get(claim, "code")


def name_exchange_secret(job: TrainingJob, placement: Placement) -> str:
    """The name of the Secret with the key of the job's exchange. Each run has its own, since that
    of an earlier one may be about to be garbage-collected.
    """
    run = sha256(placement.run_id.encode()).hexdigest()[:10]
    return f"{job.metadata.name}-exchange-{run}"


def digest_version(job: TrainingJob, code: str) -> str:
    """Digest of everything that the job's pods run, including the digest of their code or the name
    of the ConfigMap that has it; independent of the number of nodes.
    """
    if job.spec.code is not None and (job.spec.code.url or job.spec.code.claim) is not None:
        code = encode_json(job.spec.code.model_dump(mode="json"))
    elif job.spec.code is not None and job.spec.code.config_map is not None:
        items = [[each.key, each.path] for each in job.spec.code.items]
        code = encode_json([job.spec.code.config_map, items]) if items else job.spec.code.config_map
    spec = job.model_dump(mode="json", by_alias=True)["spec"]
    settings = {name: value for name, value in spec.items() if name not in _NOT_IN_PODS}
    if spec["checkpoints"] is not None:
        del spec["checkpoints"]["reclaimPolicy"]
    for data in spec["data"]:
        if data["access"] == "ReadOnly":  # as earlier versions have it, without a field
            del data["access"]
    if job.spec.install is not None:  # which earlier versions do not have
        settings["install"] = spec["install"]
    return sha256(_write({**settings, "code": code}).encode()).hexdigest()[:10]


def _write(document: dict[str, Any]) -> str:
    return encode_json(document, indent=2, ensure_ascii=False) + "\n"


def _metadata(job: TrainingJob) -> Callable[..., dict[str, Any]]:
    """A function for templates: the metadata of an object, with optional further labels and
    annotations.
    """
    own = own_labels(TracedValue(job.metadata.name, "metadata.name"))
    labels = {**trace_value(job.metadata.labels, "metadata.labels"), **own}
    annotations = trace_value(job.metadata.annotations, "metadata.annotations")

    def metadata(
        suffix: str = "",
        *,
        extra_labels: dict[str, Any] | None = None,
        extra_annotations: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        name = TracedValue(job.metadata.name + suffix, "metadata.name")
        found: dict[str, Any] = {"name": name}
        if job.metadata.namespace is not None:
            found["namespace"] = TracedValue(job.metadata.namespace, "metadata.namespace")
        found["labels"] = {**labels, **(extra_labels or {})}
        if annotations or extra_annotations:
            found["annotations"] = {**annotations, **(extra_annotations or {})}
        return found

    return metadata


def _field(document: dict[str, Any]) -> Callable[[str], Any]:
    """A function for templates: the value at a path of the job file, traced to that path."""

    def field(path: str) -> Any:
        value: Any = document
        for part in path.split("."):
            value = value[part]
        return trace_value(value, path)

    return field


def check(job: TrainingJob, placement: Placement) -> None:
    """Raise `KdistError` with everything that pods need and the job lacks."""
    problems, hint = [], ""
    if job.spec.image is None:
        problems.append("spec.image is missing: pods need the image of the trainer")
        hint = "`--set spec.image=REGISTRY/NAME:TAG` sets it for this command"
    problems += [
        f"spec.data[{index}] has only the local path {data.path}; add the claim with the data on "
        "the cluster, or its url"
        for index, data in enumerate(job.spec.data)
        if data.claim is None and data.url is None
    ]
    train, checkpoints = job.spec.train, job.spec.checkpoints
    has_ledger = checkpoints is not None and checkpoints.in_cluster
    if train is not None and train.tracker is not None and not has_ledger:
        problems.append(
            "spec.train.tracker is given the steps that checkpoints hold, and there are none; set "
            "spec.checkpoints to {claim: NAME}, {size: 10Gi} or {url: s3://BUCKET/PREFIX}"
        )
    code = job.spec.code
    if code is not None and code.path is not None and placement.code is None:
        problems.append(f"spec.code: the files of {code.path} were not read")
    if problems:
        raise KdistError("; ".join(problems), hint=hint, next_command="kdist explain spec")


# The image's root is read-only, and output should appear at once; a job may override these.
_DEFAULT_VARIABLES: Final = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}  # noqa: S108 - an emptyDir of the pod
# What the trainer's own image sets, and where the packages are.
_INSTALL_VARIABLES: Final = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": "/packages/site",
    "USER": "kdist",
}


def read_pod(job: TrainingJob, values: Mapping[str, Any]) -> dict[str, Any]:
    """The pod template as a document of traced values. Raises `KdistError` if the overlay changes
    what kdist requires.
    """
    taken = {toleration.key for toleration in job.spec.tolerations}
    lost = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    more = {
        "lost_node_taints": [key for key in lost if key not in taken],
        "tolerations": [
            toleration.model_dump(by_alias=True, exclude_none=True)
            for toleration in job.spec.tolerations
        ],
        "mounts": [
            {
                "name": f"data-{index}",
                "claim": None if data.claim is None else TracedValue(data.claim, "spec.data"),
                "path": TracedValue(data.mount_path, "spec.data"),
                "argument": literal(data.mount_path),
                "read_only": data.access == "ReadOnly" or TracedValue(False, "spec.data"),
            }
            for index, data in enumerate(job.spec.data)
        ],
        "init_mount": INIT_MOUNT,
        "fetches_init": any(source.is_weights for source in list_sources(job.spec)),
        "fetches": list_fetches(job, literal=literal, storage=storage),
        "store_variables": list(list_variables(job)),
        "variables": list(_variables(job)),
        "default_variables": [
            {"name": name, "value": value}
            for name, value in (
                _DEFAULT_VARIABLES | (_INSTALL_VARIABLES if job.spec.install is not None else {})
            ).items()
            if name not in {variable.name for variable in job.spec.env}
        ],
        "pull_policy": _pull_policy(job.spec.image or ""),
        "resources": _resources(values["field"], job.spec.resources.gpu),
        "fetch_resources": _resources(values["field"], 0),
    }
    (pod,) = read_template("_pod.yaml.j2", {**values, **more})
    merged = merge_overlay(pod, job.spec.pod_template, values["backend"])
    follow_training(merged, values["backend"].container, job.spec.pod_template)
    return merged


def literal(text: str) -> str:
    """Escape `text` so that Kubernetes passes it unchanged, without expanding `$(NAME)`."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _variables(job: TrainingJob) -> Iterator[dict[str, Any]]:
    for variable in job.spec.env:
        if variable.secret is None:
            found: dict[str, Any] = {"value": literal(variable.value or "")}
        else:
            found = {"valueFrom": {"secretKeyRef": variable.secret.model_dump()}}
        yield trace_value({"name": variable.name, **found}, "spec.env")


def _resources(field: Callable[[str], Any], gpus: int) -> dict[str, Any]:
    found = {name: field(f"spec.resources.{name}") for name in ("cpu", "memory")}
    return found | (
        {"nvidia.com/gpu": TracedValue(str(gpus), "spec.resources.gpu")} if gpus else {}
    )


def _pull_policy(image: str) -> str:
    """Kubernetes' own default, made explicit: a mutable tag is pulled each time."""
    name = image.rsplit("/", 1)[-1]
    mutable = "@" not in name and (":" not in name or name.endswith(":latest"))
    return "Always" if mutable else "IfNotPresent"
