"""Renders jobs once: what is decided and then carried out takes the same objects several times."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from kdist import backends, render
from kdist.backends import Placement
from kdist.manifest import Manifest
from kdist.ownership import ObjectKey
from kdist.spec import TrainingJob
from kdist_controller.record import digest_text
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


def list_children(job: TrainingJob, placement: Placement) -> frozenset[ObjectKey]:
    """The objects of a job besides its workload and its own ConfigMap. Raises as `render_objects`
    does.
    """
    return _list(_Text(_write(job)), replace(placement, suspended=False), job.metadata.name)


def digest(job: TrainingJob) -> str:
    """The digest of a job that a record of it has."""
    return _digest(_Text(_write(job)))


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


class _Text:
    """A text by which a cache finds a result, and which it does not keep: of thousands of jobs that
    have come and gone, the texts would take more memory than the results.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Text) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def take(self) -> str:
        """The text, once."""
        text, self._text = self._text, ""
        return text


@lru_cache(maxsize=4096)
def _digest(text: _Text) -> str:
    return digest_text(text.take())


@lru_cache(maxsize=64)  # whole objects, which are large
def _render(text: str, placement: Placement) -> tuple[Manifest, ...]:
    job = TrainingJob.model_validate(parse_json(text), by_alias=True, by_name=False)
    return tuple(render.render(job, placement))


@lru_cache(maxsize=4096)
def _list(text: _Text, placement: Placement, name: str) -> frozenset[ObjectKey]:
    kind = backends.get(placement.backend).kind
    return frozenset(
        ObjectKey(each.api_version, each.kind, each.name)
        for each in _render(text.take(), placement)
        if (each.kind, each.name) not in (("ConfigMap", name), (kind, name))
    )
