"""The pod template that all kinds share, with the job's own overlay laid over it last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kdist.render.overlay import lay
from kdist.render.templates import Sourced, read_template
from kdist.spec import TrainingJob

# The root of the image is read-only, and what is printed shall be seen at once; a job may say otherwise.
_DEFAULT_VARIABLES: Final = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}  # noqa: S108 - an emptyDir of the pod


def read_pod(job: TrainingJob, values: Mapping[str, Any]) -> dict[str, Any]:
    """The pod template as a document with marked leaves. Raises `KdistError` if the overlay breaks what kdist needs."""
    taken = {toleration.key for toleration in job.spec.tolerations}
    lost = [key for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable") if key not in taken]
    more = {
        "lost_node_taints": lost,
        "tolerations": [toleration.model_dump(by_alias=True, exclude_none=True) for toleration in job.spec.tolerations],
        "mounts": list(_mounts(job)),
        "variables": list(_variables(job)),
        "default_variables": [
            {"name": name, "value": value}
            for name, value in _DEFAULT_VARIABLES.items()
            if name not in {variable.name for variable in job.spec.env}
        ],
        "pull_policy": _pull_policy(job.spec.image or ""),
        "resources": _resources(values["field"], job.spec.resources.gpu),
    }
    (pod,) = read_template("_pod.yaml.j2", {**values, **more})
    return lay(pod, job.spec.pod_template, values["backend"])


def literal(text: str) -> str:
    """`text` so that Kubernetes hands it to the container as it is, where it would otherwise replace `$(NAME)`."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _mounts(job: TrainingJob) -> Iterator[dict[str, Any]]:
    for data in job.spec.data:
        claim, path = Sourced(data.claim, "spec.data"), Sourced(data.mount_path, "spec.data")
        yield {"claim": claim, "path": path, "argument": literal(data.mount_path)}


def _variables(job: TrainingJob) -> Iterator[dict[str, Any]]:
    for variable in job.spec.env:
        secret = variable.secret and variable.secret.model_dump()
        yield {"name": variable.name, "value": literal(variable.value or ""), "secret": secret}


def _resources(field: Callable[[str], Any], gpus: int) -> dict[str, Any]:
    found = {name: field(f"spec.resources.{name}") for name in ("cpu", "memory")}
    return found | ({"nvidia.com/gpu": Sourced(str(gpus), "spec.resources.gpu")} if gpus else {})


def _pull_policy(image: str) -> str:
    """Kubernetes' own default, written out: a tag that moves is pulled each time."""
    name = image.rsplit("/", 1)[-1]
    moves = "@" not in name and (":" not in name or name.endswith(":latest"))
    return "Always" if moves else "IfNotPresent"
