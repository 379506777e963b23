"""Renders a `TrainingJob` to Kubernetes objects. Deterministic: the same job gives the same bytes,
without clock, network or randomness.

Start with `render` here. `context` computes the values for the Jinja templates in `manifests/`,
`templates` renders them and tracks which field of job.yaml each value comes from, `storage` has
what pods need to reach checkpoints and data, `overlay` merges `spec.podTemplate` and checks
the result, and `text` writes manifests as YAML or JSON. What differs between workload kinds is in
`kdist.backends`; sending objects is in `kdist.deploy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kdist import backends, manifest
from kdist.backends import Placement
from kdist.errors import KdistError
from kdist.manifest import Manifest
from kdist.render.context import (
    check,
    check_size,
    collect,
    digest_version,
    name_exchange_secret,
    pack,
    read_pod,
)
from kdist.render.overlay import OVERLAY, violations
from kdist.render.packages import describe_install, list_packages
from kdist.render.pod_rules import PodTemplateError
from kdist.render.templates import Fragment, read_template, render_template
from kdist.spec import TrainingJob
from kdist_trainer.formats import stamp
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json


def render(job: TrainingJob, placement: Placement | None = None) -> list[Manifest]:
    """All objects of the job, in the order to apply them; without a placement only the ConfigMap
    that a local run reads.

    Raises `KdistError` with everything that a cluster needs and the job lacks.
    """
    if placement is None:
        return render_template("configmap.yaml.j2", collect(job, None))
    job = job.with_replicas()
    backend = backends.get(placement.backend)
    check(job, placement)
    values = _collect_for_pod(job, placement)
    values["pod"] = Fragment("pod", read_pod(job, values))
    for part in backend.parts:
        values[part] = Fragment(part, read_template(f"_{part}.yaml.j2", values)[0])
    names = [
        "configmap.yaml.j2",
        "account.yaml.j2",
        "storage.yaml.j2",
        "network.yaml.j2",
        backend.template,
    ]
    found = manifest.sort(each for name in names for each in render_template(name, values))
    for each in found:
        annotations = each.document["metadata"].setdefault("annotations", {})
        annotations[manifest.OWNER] = manifest.mark(job.metadata.name, each.kind, each.name)
    return found


def _collect_for_pod(job: TrainingJob, placement: Placement) -> dict[str, Any]:
    """The values for the templates, but the pod template and what contains it."""
    values = collect(job, placement)
    code = pack(placement.code) if placement.code is not None else None
    values["code"], values["install"] = code, describe_install(job)
    if code is not None:  # where the commands find it again, whatever the workload mounts
        where = {"name": f"{job.metadata.name}-code-{code['digest']}", "items": code["items"]}
        values["code_json"] = encode_json(stamp("code.json", where), ensure_ascii=False) + "\n"
    values["version"] = digest_version(job, code["digest"] if code is not None else "")
    values |= backends.get(placement.backend).values(job, placement)
    return values


def find_pod_problems(job: TrainingJob) -> list[tuple[tuple[str | int, ...], str, str]]:
    """What kdist, or any cluster, refuses of the job's `podTemplate`: place, message and hint."""
    job = job.with_replicas()
    kind = "job" if job.spec.backend == "auto" else job.spec.backend
    sends_code = job.spec.code is not None and job.spec.code.path is not None
    placement = Placement(
        kind, backends.choose_rendezvous(job), "", code={} if sends_code else None
    )
    try:
        read_pod(job, _collect_for_pod(job, placement))
    except PodTemplateError as error:
        return [(path, message, "") for path, message in error.problems]
    except KdistError as error:
        message = error.message.removeprefix(f"{OVERLAY} ")
        return [(("spec", "podTemplate"), message, error.hint)]
    return []


def warn(job: TrainingJob, placement: Placement) -> list[str]:
    """Warnings about what the workload kind does not support and about an insecure podTemplate."""
    found = backends.get(placement.backend).warnings(job, placement.rendezvous)
    if job.spec.pod_template:
        pod = next(pod for each in render(job, placement) for pod in find_pods(each.document))
        found += [
            f"Pod Security `restricted` rejects the pods because of podTemplate: {each}"
            for each in violations(pod)
        ]
    return found


def find_pods(document: Any) -> Iterator[dict[str, Any]]:
    """Every pod template within an object, at any depth."""
    if isinstance(document, dict):
        template = document.get("spec")
        if isinstance(template, dict) and isinstance(template.get("containers"), list):
            yield document
        else:
            for each in document.values():
                yield from find_pods(each)
    elif isinstance(document, list):
        for each in document:
            yield from find_pods(each)


def read_train_json(manifests: Iterable[Manifest]) -> str:
    """Text of `train.json` in the rendered ConfigMap. Raises `KdistError` if there is none."""
    for each in manifests:
        if each.kind == "ConfigMap" and "train.json" in each.document.get("data", {}):
            return str(each.document["data"]["train.json"])
    raise KdistError("the rendered objects contain no train.json")


def read_job(config_map: Mapping[str, Any]) -> TrainingJob:
    """The job that a cluster's ConfigMap describes. Its namespace is that of the ConfigMap. Raises
    `KdistError` if it is not one of kdist's, of another version, or that of another job.
    """
    metadata = config_map.get("metadata") or {}
    name, namespace = metadata.get("name", ""), metadata.get("namespace")
    try:
        job = TrainingJob.model_validate(
            parse_json((config_map.get("data") or {})["job.json"]), by_alias=True, by_name=False
        )
    except (KeyError, ValueError, TypeError) as error:
        raise KdistError(
            f"ConfigMap {name} does not contain a job that this version of kdist understands",
            hint="run `kdist apply` with the job file to write it again",
        ) from error
    if job.metadata.name != name:
        raise KdistError(
            f"ConfigMap {name} contains the job {job.metadata.name}: it is not what kdist wrote",
            hint="run `kdist apply` with the job file to write it again",
        )
    own = job.metadata.model_copy(update={"namespace": namespace})
    return job.model_copy(update={"metadata": own})
