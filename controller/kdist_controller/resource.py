"""A TrainingJob resource as the API server has it, and the job that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple, Unpack

from kdist.errors import InvalidJobError, Problem
from kdist.load import load_text
from kdist.ownership import JobOwner
from kdist.spec import API_VERSION, KIND, TrainingJob
from kdist.status import documents
from kdist.status.documents import Document
from kdist_trainer.json_text import encode_json

_FOREIGN_KEYS: Final = (
    "argocd.argoproj.io/",
    "helm.toolkit.fluxcd.io/",
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
        """Its namespace and name."""
        return JobKey(
            documents.text(self.document, "metadata", "namespace"), documents.name(self.document)
        )

    @property
    def uid(self) -> str:
        """Identifies it for as long as it exists."""
        return documents.text(self.document, "metadata", "uid")

    @property
    def generation(self) -> int:
        """Counts the changes of its spec."""
        return documents.integer(self.document, "metadata", "generation") or 0

    @property
    def status(self) -> Document:
        """What the controller has written."""
        return documents.mapping(self.document, "status")

    @property
    def deleting(self) -> bool:
        """Whether it is being deleted, and its objects with it."""
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
        """The job that it asks for, with `replicas` as its size.

        Raises:
            InvalidJobError: it is not valid; the problems are those that `kdist validate` finds.
        """
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
