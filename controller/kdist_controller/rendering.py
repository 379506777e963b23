"""Renders jobs once: what is decided and then carried out takes the same objects several times."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

from kdist import backends, render
from kdist.backends import Placement
from kdist.manifest import Manifest
from kdist.ownership import ObjectKey
from kdist.spec import TrainingJob
from kdist_trainer.untrusted_text import parse_json


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
    return _list(_write(job), replace(placement, suspended=False), job.metadata.name)


def _write(job: TrainingJob) -> str:
    return json.dumps(job.to_document(), ensure_ascii=False)


@lru_cache(maxsize=64)  # whole objects, which are large
def _render(text: str, placement: Placement) -> tuple[Manifest, ...]:
    job = TrainingJob.model_validate(parse_json(text), by_alias=True, by_name=False)
    return tuple(render.render(job, placement))


@lru_cache(maxsize=4096)
def _list(text: str, placement: Placement, name: str) -> frozenset[ObjectKey]:
    kind = backends.get(placement.backend).kind
    return frozenset(
        ObjectKey(each.api_version, each.kind, each.name)
        for each in _render(text, placement)
        if (each.kind, each.name) not in (("ConfigMap", name), (kind, name))
    )
