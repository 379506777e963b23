"""The init containers that fetch data and weights by URL before a pod's agent starts: their
arguments and environment, and what the NetworkPolicy has to allow for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kdist.render.templates import TracedValue, trace_value
from kdist.spec import SOURCE_VARIABLES, FetchSource, TrainingJob, count_bytes, list_sources
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
            "variables": list(_variables(source)),
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


def _variables(source: FetchSource) -> Iterator[dict[str, Any]]:
    """The credentials. A Secret need not have all keys, as with checkpoints."""
    if source.secret is None:
        return
    for key in SOURCE_VARIABLES[source.scheme]:
        reference = {"name": source.secret, "key": key, "optional": True}
        found = {"name": key, "valueFrom": {"secretKeyRef": reference}}
        yield trace_value(found, f"{source.field}.secret")


def match_resources(pod: Mapping[str, Any], container: str, overlay: Mapping[str, Any]) -> None:
    """Give the init containers that fetch the CPU and memory of the training's container as the
    overlay has changed it, so that the pod requests no more; unless it names theirs.

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
        if str(each["name"]).startswith(FETCHER) and each["name"] not in own:
            each["resources"] = {
                kind: {name: amount for name, amount in found.items() if name in _SHARED}
                for kind, found in (trainer.get("resources") or {}).items()
                if kind in ("requests", "limits")
            }
