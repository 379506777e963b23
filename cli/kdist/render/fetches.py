"""The init containers that fetch data and weights by URL before a pod's agent starts: their
arguments and environment, and what the NetworkPolicy has to allow for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kdist.render.pod_overlay import OVERLAY, plain
from kdist.render.store import list_credentials
from kdist.render.templates import TracedValue
from kdist.spec import FetchSource, TrainingJob, count_bytes, list_sources
from kdist.status import FETCHER

_SHARED: Final = ("cpu", "memory", "ephemeral-storage")  # a fetch needs no GPU
_MEBI: Final = 1024 * 1024


def list_fetches(
    job: TrainingJob, *, literal: Callable[[str], str], storage: Callable[[str], str]
) -> list[dict[str, Any]]:
    """The values of the template for each source.

    Args:
        job: the job.
        literal: escapes an argument of a container.
        storage: normalizes a quantity of bytes.
    """
    return [
        {
            "name": source.name,
            "field": source.field,
            "arguments": [
                TracedValue(literal(argument), f"{source.field}.{name}")
                for name, argument in _arguments(source)
            ],
            "variables": list(list_credentials(source.scheme, source.secret, source.field))
            if source.secret is not None
            else [],
            "size": TracedValue(storage(_limit(source)), f"{source.field}.size"),
        }
        for source in list_sources(job.spec)
    ]


def _limit(source: FetchSource) -> str:
    """The limit of the volume: what is fetched, and a sixteenth for what files take up beyond their
    bytes. The kubelet evicts a pod that exceeds it, which would then fetch everything again.
    """
    return f"{-(-count_bytes(source.size) * 17 // (16 * _MEBI))}Mi"


def _arguments(source: FetchSource) -> Iterator[tuple[str, str]]:
    """The arguments that come from the file, each with the name of its field."""
    yield "url", f"--url={source.url}"
    yield "url", f"--field={source.field}"
    for name in ("endpoint", "region", "sha256"):
        if (value := getattr(source, name)) is not None:
            yield name, f"--{name}={value}"
    yield "size", f"--max-bytes={count_bytes(source.size)}"
    if source.is_weights:
        yield "url", "--weights"


def follow_training(pod: Mapping[str, Any], container: str, overlay: Mapping[str, Any]) -> None:
    """Change the init containers that fetch as the overlay has changed the training's container:
    they get its CPU and memory, so that the pod requests no more, and what it has been given in
    variables and mounts, such as a company's certificate authority. What the overlay says of an
    init container itself stays.

    Args:
        pod: the pod template with the overlay merged into it; is changed.
        container: name of the training's container.
        overlay: `spec.podTemplate`.
    """
    spec = pod["spec"]
    (trainer,) = [each for each in spec["containers"] if each["name"] == container]
    own = {
        str(each.get("name"))
        for each in (overlay.get("spec") or {}).get("initContainers") or ()
        if "resources" in each
    }
    for each in spec.get("initContainers") or ():
        if not str(each["name"]).startswith(FETCHER):
            continue
        for field, key in (("env", "name"), ("volumeMounts", "mountPath")):
            known = {plain(one[key]) for one in each[field]}
            each[field] += [
                one
                for one in trainer.get(field) or ()
                if _is_added(one[key]) and plain(one[key]) not in known
            ]
        if each["name"] not in own:
            each["resources"] = {
                kind: {name: amount for name, amount in found.items() if name in _SHARED}
                for kind, found in (trainer.get("resources") or {}).items()
                if kind in ("requests", "limits")
            }


def _is_added(value: Any) -> bool:
    return isinstance(value, TracedValue) and value.source == OVERLAY
