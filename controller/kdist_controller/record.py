"""The job's own ConfigMap as a record of what its objects were made from. Whoever may edit
ConfigMaps may have written it: no object is rendered from it, and what it says of the spec counts
only if its digest is one that the TrainingJob's status has, which only the controller writes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from kdist import render
from kdist.errors import KdistError
from kdist.spec import TrainingJob
from kdist.status import BACKEND, RENDEZVOUS, RUN_ID, STARTED, documents
from kdist.status.documents import Document
from kdist_controller.resource import Resource
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import MalformedTextError, parse_json

_LIVE: Final = ("nodes", "replicas", "suspend")
"""Fields of the spec that take effect without new pods."""
_PLACED: Final = {BACKEND: "backend", RENDEZVOUS: "rendezvous", RUN_ID: "runId"}


@dataclass(frozen=True)
class Record:
    """What the ConfigMap says.

    Attributes:
        job: the job that it names; None if that does not count.
        text: the same as it is written.
        digest: of what counts of the spec.
        objection: why it does not count; empty if it does.
    """

    job: TrainingJob | None = None
    text: str = ""
    digest: str = ""
    objection: str = ""

    def with_nodes(self, job: TrainingJob) -> str:
        """Its text with the number of nodes of another job."""
        document = parse_json(self.text)
        document["spec"]["nodes"] = job.to_document()["spec"]["nodes"]
        return encode_json(document, ensure_ascii=False, indent=2) + "\n"


def digest_text(text: str) -> str:
    """Digest of what a `job.json` says of the pods; raises `MalformedTextError`."""
    document = parse_json(text)
    spec = document.get("spec") if isinstance(document, dict) else None
    if not isinstance(spec, dict):
        raise MalformedTextError("it has no spec")
    kept = {name: value for name, value in spec.items() if name not in _LIVE}
    return hashlib.sha256(encode_json(kept, sort_keys=True).encode()).hexdigest()[:32]


def read_record(resource: Resource, config_map: Document, *, wanted: str) -> Record:
    """Read the record of a TrainingJob from the ConfigMap, which is its own.

    Args:
        resource: the TrainingJob.
        config_map: all of the ConfigMap.
        wanted: digest of the job that the TrainingJob asks for; empty if that is not valid.
    """
    text = documents.text(config_map, "data", "job.json")
    key, name = resource.key, documents.name(config_map)
    try:
        stored = parse_json(text)
        digest = digest_text(text)
        named = [documents.text(stored, "metadata", each) for each in ("namespace", "name")]
        if named != [key.namespace, name]:
            there = f"{_quote(named[1])} in namespace {_quote(named[0])}"
            return Record(objection=f"its job.json names the job {there}")
        job = render.read_job(config_map)
    except (KdistError, ValueError) as error:
        return Record(objection=f"its job.json cannot be read: {error}")
    known = documents.texts(resource.status, "appliedDigests")
    if known and digest not in (*known, wanted):
        return Record(objection="its job.json is not what the controller has written")
    for annotation, field in _PLACED.items():
        decided = documents.text(resource.status, field)
        if decided and documents.annotation(config_map, annotation) != decided:
            return Record(objection=f"its annotation {annotation} is not {decided}")
    return Record(job, text, digest)


def _quote(text: str) -> str:
    return encode_json(text[:64])


def correct(resource: Resource, config_map: Document, wanted: TrainingJob | None) -> Document:
    """The ConfigMap as those that only read it may see it: what it says of the job and its
    placement is replaced where it does not count.
    """
    metadata: dict[str, Any] = dict(documents.mapping(config_map, "metadata"))
    decided = {
        annotation: documents.text(resource.status, field)
        for annotation, field in _PLACED.items()
        if documents.text(resource.status, field)
    }
    metadata["annotations"] = {**documents.mapping(metadata, "annotations"), **decided}
    document = {} if wanted is None else wanted.to_document()
    data = {**documents.mapping(config_map, "data"), "job.json": encode_json(document)}
    return {**config_map, "metadata": metadata, "data": data}


def note_start(config_map: Document, restarted_at: str) -> Document:
    """The ConfigMap with the moment at which the TrainingJob asks for a new start, where those that
    diagnose the job look for it: they do not read the TrainingJob. As it is without either.
    """
    if not config_map or not restarted_at:
        return config_map
    metadata: dict[str, Any] = dict(documents.mapping(config_map, "metadata"))
    metadata["annotations"] = {**documents.mapping(metadata, "annotations"), STARTED: restarted_at}
    return {**config_map, "metadata": metadata}
