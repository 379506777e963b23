"""The CustomResourceDefinition of `TrainingJob`, made from the model, so that a cluster accepts the
same job.yaml as `kdist`.

The API server checks types, limits and the rules of `RULES`; the controller checks all else when it
reads a job, and reports it in the condition `Accepted`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kdist.crd.status import ResourceStatus
from kdist.crd.structural import Schema, convert
from kdist.spec import bucket, data, reference
from kdist.spec.training_job import API_VERSION, KIND
from kdist.spec.validators import DERIVED_NAME, TAKEN_NAMES
from kdist_trainer.config import source
from kdist_trainer.config.init import ONE_SOURCE
from kdist_trainer.config.source_url import (
    CREDENTIALS,
    HAS_CREDENTIALS,
    HAS_QUERY,
    NO_SCHEME,
    NO_SERVER,
    QUERY,
    SCHEMES,
    SERVER,
)

PLURAL: Final = "trainingjobs"
GROUP, _, VERSION = API_VERSION.partition("/")

_NAME: Final = "self.metadata.name"
_Rule = tuple[str, str, str]


def _matching(field: str, pattern: str, otherwise: str) -> Iterator[_Rule]:
    """The rules of a URL, each of which speaks where those before it hold."""
    text, path = f"self.{field}", f".{field}"
    absent = f"!has({text})"
    refused = [f"{text}.matches(r'{each}')" for each in (CREDENTIALS, QUERY)]
    yield f"{absent} || !{refused[0]}", HAS_CREDENTIALS, path
    yield f"{absent} || {refused[0]} || !{refused[1]}", HAS_QUERY, path
    yield f"{absent} || {' || '.join(refused)} || {text}.matches(r'{pattern}')", otherwise, path


def _of_source() -> Iterator[_Rule]:
    """The rules of a section with a URL that is fetched; the controller checks the rest of it."""
    for name in source.OF_URL:
        yield f"!has(self.{name}) || has(self.url)", source.NEEDS_URL, f".{name}"
    absent = "!has(self.url)"
    yield from _matching("url", f"^({'|'.join(SCHEMES)})://", NO_SCHEME)
    yield (
        f"!has(self.endpoint) || {absent} || !self.url.matches('^(gs|https?):')",
        source.NO_ENDPOINT_HERE,
        ".endpoint",
    )
    yield (
        f"!has(self.region) || {absent} || self.url.startsWith('s3:')",
        source.S3_ONLY,
        ".region",
    )


RULES: Final[dict[str, tuple[_Rule, ...]]] = {
    "": (
        (
            f"!({_NAME} in {list(TAKEN_NAMES)})",
            "every namespace already has an object of that name",
            "",
        ),
        (
            f"!{_NAME}.matches(r'{DERIVED_NAME.pattern}')",
            "a job without the end of that name would create an object of this name",
            "",
        ),
    ),
    "spec": (
        (
            "has(self.train) || has(self.script)",
            "needs train (the managed loop) or script (a torchrun script)",
            "",
        ),
        (
            "!has(self.train) || !has(self.script)",
            "train and script exclude each other; keep one",
            ".script",
        ),
        (
            "!has(self.preflight) || !has(self.script)",
            "belongs to train: a script creates its own process group",
            ".preflight",
        ),
    ),
    "spec.procsPerNode": (
        (
            "type(self) == int ? self >= 1 && self <= 1024 : self == 'auto'",
            "must be a whole number from 1 to 1024 or auto",
            "",
        ),
    ),
    "spec.data[]": (
        ("has(self.claim) || has(self.path) || has(self.url)", data.NO_SOURCE, ""),
        ("!has(self.claim) || !has(self.url)", data.TWO_SOURCES, ".url"),
        *_of_source(),
    ),
    "spec.checkpoints": (
        (
            "[has(self.claim), has(self.size), has(self.path), has(self.url)]"
            ".filter(given, given).size() == 1",
            "needs exactly one of claim, size, path and url",
            "",
        ),
        *(
            (
                f"!has(self.{name}) || has(self.size)",
                "applies to a claim that is created for the job: it needs size",
                f".{path}",
            )
            for name, path in (
                ("class", "class"),
                ("accessMode", "accessMode"),
                ("reclaimPolicy", "reclaimPolicy"),
            )
        ),
        *(
            (f"!has(self.{name}) || has(self.url)", "belongs to a bucket: it needs url", f".{name}")
            for name in ("endpoint", "region", "secret")
        ),
        *_matching("url", bucket.BUCKET, bucket.NO_BUCKET),
        *_matching("endpoint", SERVER, NO_SERVER),
        (
            "!has(self.endpoint) || !has(self.url) || !self.url.startsWith('gs:')",
            "is for s3:// and az://: the buckets of gs:// have one address",
            ".endpoint",
        ),
        (
            "!has(self.region) || !has(self.url) || !self.url.matches('^(gs|az):')",
            "is for s3:// only",
            ".region",
        ),
    ),
    "spec.env[]": (
        ("has(self.value) != has(self.secret)", "needs exactly one of value and secret", ""),
    ),
    "spec.tolerations[]": (
        (
            "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            "must be Exists if there is no key",
            ".operator",
        ),
        (
            "!has(self.operator) || self.operator != 'Exists' || !has(self.value)",
            "cannot be used with the operator Exists",
            ".value",
        ),
    ),
    "spec.script": (
        ("has(self.path) != has(self.module)", "needs exactly one of path and module", ""),
    ),
    "spec.train": (
        ("has(self.epochs) != has(self.steps)", "needs exactly one of epochs and steps", ""),
    ),
    "spec.train.init": (
        ("has(self.path) != has(self.url)", ONE_SOURCE, ""),
        *_of_source(),
    ),
    "spec.train.checkpoint.every": (
        (
            "has(self.auto) || has(self.seconds) || has(self.steps)",
            "needs auto, seconds, steps, or steps with one of the others",
            "",
        ),
        (
            "!has(self.auto) || !has(self.seconds)",
            "auto and seconds exclude each other; keep one",
            ".seconds",
        ),
    ),
}
"""Rules across fields, by the section that they are of: an expression of CEL, the words of `kdist
validate`, and the field that is wrong.
"""
_MERGED_BY: Final = {"spec.env": "name", "spec.data": "mountPath", "status.conditions": "type"}
"""Lists whose items are known by a field, so that two appliers may each have their own."""
_COLUMNS: Final = (
    ("Phase", "string", ".status.phase", 0),
    ("Nodes", "string", ".status.nodes", 0),
    ("Step", "integer", ".status.step", 0),
    ("Progress", "string", ".status.progress", 0),
    ("Loss", "string", ".status.loss", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Backend", "string", ".status.backend", 1),
    ("Checkpoint", "integer", ".status.lastCheckpoint.step", 1),
    ("Message", "string", ".status.message", 1),
)
"""Name, type, path and priority of the columns of `kubectl get`; those of priority 1 are wide."""


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition, as a new document."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "kdist"}},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["ktj"],  # not tj, which people use for Kubeflow's TrainJob
                # what `kubectl delete all --all` leaves would make its objects again
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority}
                        for name, kind, path, priority in _COLUMNS
                    ],
                }
            ],
        },
    }


def text() -> str:
    """The CustomResourceDefinition as YAML."""
    import yaml

    return yaml.safe_dump(definition(), sort_keys=False, allow_unicode=True, width=100)


def _schema() -> Schema:
    schema = convert(reference.schema())
    fields = schema["properties"]
    name = fields["metadata"]["properties"]["name"]
    # of the metadata a CRD may limit the name alone
    limits = {key: value for key, value in name.items() if key != "description"}
    fields["metadata"] = {"type": "object", "properties": {"name": limits}}
    fields["status"] = convert(ResourceStatus.model_json_schema(by_alias=True))
    for path, rules in RULES.items():
        _find(schema, path)["x-kubernetes-validations"] = [
            {"rule": rule, "message": message} | ({"fieldPath": field} if field else {})
            for rule, message, field in rules
        ]
    for path, key in _MERGED_BY.items():
        found = _find(schema, path)
        found |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return schema


def _find(schema: Schema, path: str) -> Schema:
    """The schema of a field, such as `spec.env[]`."""
    for part in path.split(".") if path else ():
        schema = schema["properties"][part.removesuffix("[]")]
        if part.endswith("[]"):
            schema = schema["items"]
    return schema
