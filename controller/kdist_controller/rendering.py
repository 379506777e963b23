"""Renders jobs once: what is decided and then carried out takes the same objects several times."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from kdist import backends, render
from kdist.backends import Placement
from kdist.manifest import Manifest
from kdist.ownership import ObjectKey
from kdist.spec import TrainingJob
from kdist_controller.record import digest_text
from kdist_controller.resource import Results
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import parse_json

_FIXED: Final = ("template", "successPolicy")
"""Fields of a workload that cannot change while its pods run."""


def render_objects(job: TrainingJob, placement: Placement) -> tuple[Manifest, ...]:
    """All objects of a job. Raises `KdistError` for one that cannot be rendered."""
    return _render(_write(job), placement)


def render_own(job: TrainingJob, placement: Placement) -> Manifest:
    """The job's own ConfigMap. Raises as `render_objects` does."""
    own = ("ConfigMap", job.metadata.name)
    return next(each for each in render_objects(job, placement) if (each.kind, each.name) == own)


def list_children(job: TrainingJob, placement: Placement, results: Results) -> frozenset[ObjectKey]:
    """The objects of a job besides its workload and its own ConfigMap. Raises as `render_objects`
    does.
    """
    placement = replace(placement, suspended=False)
    return results.recall(_list, _write(job), placement, job.metadata.name)


def digest(job: TrainingJob, results: Results) -> str:
    """The digest of a job that a record of it has."""
    return results.recall(digest_text, _write(job))


def find_sized(job: TrainingJob, placement: Placement) -> tuple[Manifest, dict[str, Any]]:
    """The workload of a job, and the part of it that follows from the number of nodes, but for
    what cannot change while pods run.
    """
    nodes = job.spec.nodes
    more = nodes.model_copy(update={"min": nodes.min + 1, "max": nodes.max + 1})
    spec = job.spec.model_copy(update={"nodes": more})
    one, other = (
        next(each for each in render_objects(found, placement) if _is_workload(each, placement))
        for found in (job, job.model_copy(update={"spec": spec}))
    )
    return one, _differing(one.document["spec"], other.document["spec"])


def _is_workload(manifest: Manifest, placement: Placement) -> bool:
    return manifest.kind == backends.get(placement.backend).kind


def _differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in one.items():
        if key in _FIXED or value == other.get(key):
            continue
        both = isinstance(value, dict) and isinstance(other.get(key), dict)
        found[key] = _differing(value, other[key]) if both else value
    return {key: value for key, value in found.items() if value != {}}


def _write(job: TrainingJob) -> str:
    return encode_json(job.to_document(), ensure_ascii=False)


@lru_cache(maxsize=64)  # whole objects, which are large
def _render(text: str, placement: Placement) -> tuple[Manifest, ...]:
    job = TrainingJob.model_validate(parse_json(text), by_alias=True, by_name=False)
    return tuple(render.render(job, placement))


def _list(text: str, placement: Placement, name: str) -> frozenset[ObjectKey]:
    kind = backends.get(placement.backend).kind
    return frozenset(
        ObjectKey(each.api_version, each.kind, each.name)
        for each in _render(text, placement)
        if (each.kind, each.name) not in (("ConfigMap", name), (kind, name))
    )
