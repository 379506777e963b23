"""A TrainingJob: the resource, the job that its spec asks for, the objects rendered from it, and
the record of what its existing objects were rendered from.

That record is the job's own ConfigMap, which anybody with the right to edit ConfigMaps may have
written. So no object is rendered from it, and what it says of the spec counts only if its digest is
listed in the TrainingJob's status, which only the controller writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple, Unpack

from kdist import backends, render
from kdist.backends import Backend, Placement
from kdist.errors import InvalidJobError, KdistError, Problem
from kdist.job_file import load_text
from kdist.manifest import CODE_SENT, COMMIT, JobOwner, Manifest, ObjectKey
from kdist.spec import API_VERSION, KIND, TrainingJob
from kdist.status import BACKEND, RENDEZVOUS, RUN_ID, STARTED, documents
from kdist.status.documents import Document
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json

_FOREIGN_KEYS: Final = (
    "argocd.argoproj.io/",
    "helm.toolkit.fluxcd.io/",
    CODE_SENT,
    COMMIT,
    "kubectl.kubernetes.io/",
    "kustomize.toolkit.fluxcd.io/",
    "meta.helm.sh/",
)
"""Prefixes of labels and annotations by which tools know their own objects: a copy of them on the
objects of a job would make these the tools' own.
"""
MAX_VALUES: Final = 5_000
"""How many values a spec may have: parsed, an empty list takes fifty times its text."""
OVERSIZED: Final = "oversized"
"""Key of a trimmed TrainingJob whose spec has more values and was left out."""
_MAX_KEPT: Final = 16_384
"""Length of a TrainingJob in characters up to which the parsed job is kept."""
_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class JobKey(NamedTuple):
    """Namespace and name of a TrainingJob."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Results:
    """The latest result of each function of one TrainingJob. It is needed again whenever any object
    of the job changes, and is gone when the cache forgets the job. Threads may share it.
    """

    def __init__(self) -> None:
        self._last: dict[Callable[..., Any], tuple[tuple[Any, ...], Any]] = {}

    def recall(self, make: Callable[[Unpack[_Arguments]], _Result], *of: *_Arguments) -> _Result:
        """The result of `make`, which is called only if its latest arguments were others."""
        known = self._last.get(make)
        if known is not None and known[0] == of:
            found: _Result = known[1]
            return found
        made = make(*of)
        self._last[make] = (of, made)
        return made


@dataclass(frozen=True)
class Resource:
    """A TrainingJob resource.

    Attributes:
        document: the object.
        results: the latest results of functions of it.
    """

    document: Document
    results: Results = field(default_factory=Results, compare=False, repr=False)

    @property
    def key(self) -> JobKey:
        return JobKey(
            documents.text(self.document, "metadata", "namespace"), documents.name(self.document)
        )

    @property
    def uid(self) -> str:
        return documents.uid(self.document)

    @property
    def generation(self) -> int:
        return documents.integer(self.document, "metadata", "generation") or 0

    @property
    def status(self) -> Document:
        """What the controller has written."""
        return documents.mapping(self.document, "status")

    @property
    def deleting(self) -> bool:
        return bool(documents.text(self.document, "metadata", "deletionTimestamp"))

    @property
    def owner_reference(self) -> dict[str, Any]:
        """The reference by which its objects are deleted with it. It blocks no deletion, so that
        nobody needs the right to change finalizers.
        """
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.key.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }

    def owner(self, makers: frozenset[str] = frozenset()) -> JobOwner:
        """It as the owner of the objects that are made for it, and not for an earlier one of its
        name. `makers` are the uids of what makes its pods.
        """
        return JobOwner(self.key.namespace, self.key.name, uid=self.uid, makers=makers)

    def owns(self, document: Document) -> bool:
        """Whether an object was made for it. Pods are not looked at."""
        return self.owner().owns(document)

    def read_job(self) -> TrainingJob:
        """The job that it asks for, with `replicas` as its size. Raises `InvalidJobError`."""
        if self.document.get(OVERSIZED):
            message = f"the spec has more than {MAX_VALUES} values"
            hint = "put lists and files into a ConfigMap or the image"
            raise InvalidJobError(
                self.key.name,
                [Problem(self.key.name, 1, 1, "spec", message, hint=hint)],
                next_command="",
            )
        metadata = documents.mapping(self.document, "metadata")
        job = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "name": self.key.name,
                "namespace": self.key.namespace,
                "labels": _own(metadata.get("labels")),
                "annotations": _own(metadata.get("annotations")),
            },
            "spec": self.document.get("spec") or {},
        }
        try:
            text = encode_json(job, ensure_ascii=False)
        except ValueError as error:  # too deep
            raise InvalidJobError(self.key.name, (), next_command="") from error
        if len(text) > _MAX_KEPT:
            return _read(text, self.key.name)
        return self.results.recall(_read, text, self.key.name)


def _read(text: str, name: str) -> TrainingJob:
    return load_text(text, source=name, generated=True).with_replicas()


def _own(entries: object) -> dict[str, Any]:
    """The labels or annotations that are meant for the job's objects too."""
    found = entries if isinstance(entries, dict) else {}
    return {key: value for key, value in found.items() if not key.startswith(_FOREIGN_KEYS)}


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
    """Read the record of a TrainingJob from the ConfigMap, which is its own. `wanted` is the digest
    of the job that the TrainingJob asks for; empty if that is not valid.
    """
    text = documents.text(config_map, "data", "job.json")
    key, name = resource.key, documents.name(config_map)
    try:
        stored = parse_json(text)
        digest = digest_text(text)
        named = [documents.text(stored, "metadata", each) for each in ("namespace", "name")]
        if named != [key.namespace, name]:
            namespace, other = (encode_json(each[:64]) for each in named)
            there = f"{other} in namespace {namespace}"
            return Record(objection=f"its job.json names the job {there}")
        job = render.read_job(config_map)
    except (KdistError, ValueError) as error:
        return Record(objection=f"its job.json cannot be read: {error}")
    known = documents.texts(resource.status, "appliedDigests")
    if known and digest not in (*known, wanted):
        return Record(objection="its job.json is not what the controller has written")
    for annotation, status_field in _PLACED.items():
        decided = documents.text(resource.status, status_field)
        if decided and documents.annotation(config_map, annotation) != decided:
            return Record(objection=f"its annotation {annotation} is not {decided}")
    return Record(job, text, digest)


def correct_record(
    resource: Resource, config_map: Document, wanted: TrainingJob | None
) -> Document:
    """The ConfigMap as those that only read it may see it: what it says of the job and its
    placement is replaced where it does not count.
    """
    decided = {
        annotation: value
        for annotation, name in _PLACED.items()
        if (value := documents.text(resource.status, name))
    }
    document = {} if wanted is None else wanted.to_document()
    data = {**documents.mapping(config_map, "data"), "job.json": encode_json(document)}
    return {**_annotate(config_map, decided), "data": data}


def note_start(config_map: Document, restarted_at: str) -> Document:
    """The ConfigMap with the moment at which the TrainingJob asks for a new start, where those that
    diagnose the job look for it: they do not read the TrainingJob. As it is without either.
    """
    if not config_map or not restarted_at:
        return config_map
    return _annotate(config_map, {STARTED: restarted_at})


def _annotate(config_map: Document, added: Mapping[str, str]) -> Document:
    metadata = documents.mapping(config_map, "metadata")
    annotations = {**documents.mapping(metadata, "annotations"), **added}
    return {**config_map, "metadata": {**metadata, "annotations": annotations}}


_FIXED: Final = ("template", "successPolicy")
"""Fields of a workload that cannot change while its pods run."""


def render_objects(job: TrainingJob, placement: Placement) -> tuple[Manifest, ...]:
    """All objects of a job. Raises `KdistError` for one that cannot be rendered."""
    return _render(_encode_job(job), placement)


def render_own(job: TrainingJob, placement: Placement) -> Manifest:
    """The job's own ConfigMap. Raises as `render_objects` does."""
    own = ("ConfigMap", job.metadata.name)
    return next(each for each in render_objects(job, placement) if (each.kind, each.name) == own)


def list_children(job: TrainingJob, placement: Placement, results: Results) -> frozenset[ObjectKey]:
    """The objects of a job besides its workload and its own ConfigMap."""
    placement = replace(placement, suspended=False)
    return results.recall(_list_children, _encode_job(job), placement, job.metadata.name)


def digest_job(job: TrainingJob, results: Results) -> str:
    """The digest of a job that a record of it has."""
    return results.recall(digest_text, _encode_job(job))


def find_sized(job: TrainingJob, placement: Placement) -> tuple[Manifest, dict[str, Any]]:
    """The workload of a job, and the part of it that follows from the number of nodes and may
    change.
    """
    nodes, kind = job.spec.nodes, backends.get(placement.backend).kind
    more = nodes.model_copy(update={"min": nodes.min + 1, "max": nodes.max + 1})
    spec = job.spec.model_copy(update={"nodes": more})
    one, other = (
        next(each for each in render_objects(found, placement) if each.kind == kind)
        for found in (job, job.model_copy(update={"spec": spec}))
    )
    return one, _differing(one.document["spec"], other.document["spec"])


def _differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in one.items():
        if key in _FIXED or value == other.get(key):
            continue
        both = isinstance(value, dict) and isinstance(other.get(key), dict)
        found[key] = _differing(value, other[key]) if both else value
    return {key: value for key, value in found.items() if value != {}}


def _encode_job(job: TrainingJob) -> str:
    return encode_json(job.to_document(), ensure_ascii=False)


@lru_cache(maxsize=64)  # whole objects, which are large
def _render(text: str, placement: Placement) -> tuple[Manifest, ...]:
    job = TrainingJob.model_validate(parse_json(text), by_alias=True, by_name=False)
    return tuple(render.render(job, placement))


def _list_children(text: str, placement: Placement, name: str) -> frozenset[ObjectKey]:
    kind = backends.get(placement.backend).kind
    return frozenset(
        ObjectKey(each.api_version, each.kind, each.name)
        for each in _render(text, placement)
        if (each.kind, each.name) not in (("ConfigMap", name), (kind, name))
    )


_NOT_COMPARED: Final = (*_LIVE, "restartedAt")
"""Fields of the spec that take effect without new pods, or are no part of them."""
_FORMER_INTERVAL: Final = {"seconds": 300, "steps": None}
"""What earlier versions wrote out for jobs that name no interval: their pods keep it."""
_SHOWN = 4
_LONGEST_VALUE = 60


def find_differences(
    wanted: TrainingJob, applied: TrainingJob, backend: Backend | None
) -> list[str]:
    """Each difference between the job that is asked for and the one that the pods were made from
    which needs new pods, such as `spec.image: trainer:1 → trainer:2`.
    """
    found = list(_compare(_comparable(applied), _comparable(wanted), ""))
    if wanted.spec.nodes != applied.spec.nodes and not can_resize(wanted, applied, backend):
        before, after = (each.to_document()["spec"]["nodes"] for each in (applied, wanted))
        found += _compare(before, after, "spec.nodes")
    return found


def can_resize(wanted: TrainingJob, applied: TrainingJob, backend: Backend | None) -> bool:
    """Whether the job can get its number of nodes without new pods for the others."""
    if wanted.spec.nodes.standby != applied.spec.nodes.standby:
        return False
    return can_scale(applied, backend)


def can_scale(job: TrainingJob, backend: Backend | None) -> bool:
    """Whether the number of nodes of a job that runs can be changed."""
    if backend is None:
        return False
    return not backend.scalable and (job.spec.queue is None or backend.name == "job")


def describe_differences(differences: Sequence[str]) -> str:
    """The differences as one sentence, the first few in full."""
    shown = "; ".join(differences[:_SHOWN])
    more = len(differences) - _SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown


def _comparable(job: TrainingJob) -> dict[str, Any]:
    document = job.to_document()
    spec = {name: value for name, value in document["spec"].items() if name not in _NOT_COMPARED}
    checkpoint = (spec.get("train") or {}).get("checkpoint", {})
    if checkpoint.get("every") == _FORMER_INTERVAL:
        del checkpoint["every"]
    return {"spec": spec}  # labels and annotations come with the next restart, and matter to none


def _compare(before: Any, after: Any, path: str) -> Iterator[str]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            inner = f"{path}.{key}" if path else str(key)
            yield from _compare(before.get(key), after.get(key), inner)
    else:
        yield f"{path}: {_show_value(before)} → {_show_value(after)}"


def _show_value(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else encode_json(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
