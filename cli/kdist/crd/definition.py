"""The CustomResourceDefinition of `TrainingJob`, made from the model, so that a cluster accepts the
same job.yaml as `kdist`.

The API server checks types and limits; the controller checks the rules across fields when it reads
a job, as `kdist validate` does, and reports them in the condition `Accepted`. `ResourceStatus` is
what the controller writes: what `kubectl get` shows of a job, and the conditions that `kubectl
wait` and GitOps tools read.

`convert` turns pydantic's JSON Schema into a structural schema: one type for each field, no
references, and OpenAPI 3.0's words. A field of several types, such as `nodes`, has none in the
result and keeps unknown fields; the limits of its types stay, because a limit on numbers does not
concern a mapping. A whole number or text is a type of its own in Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from kdist.spec import reference
from kdist.spec.models import Time
from kdist.spec.training_job import API_VERSION, KIND
from kdist_trainer.config import ConfigModel

Schema = dict[str, Any]

_KEEP: Final = "x-kubernetes-preserve-unknown-fields"
_SAME: Final = (
    *("minimum", "maximum", "minLength", "maxLength", "pattern", "enum"),
    *("minItems", "maxItems", "maxProperties", "required", "format"),
)
"""Keywords of JSON Schema that have the same meaning in a structural schema."""
_INT32_MAX: Final = 2**31 - 1
_EXACT: Final = 2**53
"""The largest limit that a float has exactly."""


def convert(document: Mapping[str, Any]) -> Schema:
    """Convert a JSON Schema to a structural schema. Raises `ValueError` for a keyword that none can
    express.
    """
    return _convert(document, document.get("$defs", {}))


def _convert(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    forms = [form for form in _forms(node, definitions) if form.get("type") != "null"]
    schema: Schema = {}
    if description := node.get("description") or forms[0].get("description"):
        schema["description"] = " ".join(str(description).split())
    if len(forms) == 1:
        schema |= _one_type(forms[0], definitions)
    else:
        schema |= _several_types(forms)
    default = node.get("default")
    if isinstance(default, bool | int | float | str):
        schema["default"] = default
    return schema


def _forms(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The types that a value may have, without references."""
    if "$ref" in node:
        return _forms(definitions[str(node["$ref"]).rsplit("/", 1)[-1]], definitions)
    if "anyOf" in node:
        return [form for each in node["anyOf"] for form in _forms(each, definitions)]
    return [node]


def _one_type(form: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    known = {*_SAME, "type", "properties", "items", "prefixItems", "const", "description"}
    known |= {"default", "title", "$defs", "additionalProperties", "patternProperties"}
    known |= {"propertyNames", "exclusiveMinimum", "exclusiveMaximum", "$schema", "$id"}
    if foreign := set(form) - known:
        raise ValueError(f"no structural schema has {', '.join(sorted(foreign))}")
    if "type" not in form:
        return {_KEEP: True}
    schema: Schema = {"type": form["type"], **_limits(form)}
    if form["type"] == "integer":
        schema["format"] = "int32" if form.get("maximum", 0) <= _INT32_MAX else "int64"
    if "properties" in form:
        schema["properties"] = {
            name: _convert(each, definitions) for name, each in form["properties"].items()
        }
    elif form["type"] == "object":
        values = [*form.get("patternProperties", {}).values(), form.get("additionalProperties")]
        value = (
            _convert(values[0], definitions) if isinstance(values[0], Mapping) else {_KEEP: True}
        )
        schema |= {_KEEP: True} if value == {_KEEP: True} else {"additionalProperties": value}
    if "prefixItems" in form:  # the same type for each, because OpenAPI has no tuples
        schema["items"] = _without_defaults(_convert(form["prefixItems"][0], definitions))
    elif "items" in form:
        schema["items"] = _without_defaults(_convert(form["items"], definitions))
    return schema


def _without_defaults(schema: Schema) -> Schema:
    """The schema of what is in a list. Tools that compare what was sent with what is stored compare
    a list as a whole, so a default in it would be a difference for ever.
    """
    return {
        key: {name: _without_defaults(each) for name, each in value.items()}
        if key == "properties"
        else _without_defaults(value)
        if isinstance(value, dict)
        else value
        for key, value in schema.items()
        if key != "default"
    }


def _several_types(forms: Sequence[Mapping[str, Any]]) -> Schema:
    numbers = {form["type"] for form in forms} == {"integer", "string"}
    schema: Schema = {"x-kubernetes-int-or-string": True} if numbers else {_KEEP: True}
    for form in forms:
        # an enumeration would exclude the values of the other types
        limits = {key: value for key, value in _limits(form).items() if key != "enum"}
        schema |= {key: value for key, value in limits.items() if form["type"] != "object"}
    return schema


def _limits(form: Mapping[str, Any]) -> Schema:
    found = {key: form[key] for key in _SAME if key in form}
    if "pattern" in found:
        if re.search(r"(?<!\\)\[(\\.|[^]\\])*\\w", found["pattern"]):
            raise ValueError(f"\\w stands in a class of {found['pattern']}: write (\\w|.) instead")
        # in Go `\\w` is ASCII; in a job file it is any letter
        found["pattern"] = re.sub(r"\\w", r"[\\pL\\pM\\p{Nd}\\p{Pc}]", found["pattern"])
    if found.get("maximum", 0) > _EXACT:
        del found["maximum"]  # the API server compares floats, and int64 is the same limit
    if "const" in form:
        found["enum"] = [form["const"]]
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if key in form:
            found |= {bound: form[key], key: True}
    return found


Counter = Annotated[int, Field(ge=0, le=2**53)]
Line = Annotated[str, Field(max_length=1024)]
Sentence = Annotated[str, Field(max_length=32_768)]
ConditionType = Literal[
    "Accepted",
    "QuotaReserved",
    "Running",
    "Suspended",
    "Outdated",
    "VolumeAttached",
    "NodesAvoided",
    "Complete",
    "Failed",
    "Reconciling",
    "Stalled",
]
"""Conditions of a TrainingJob; the last two are those that kstatus knows for objects of any
kind.
"""


class Condition(ConfigModel):
    """One aspect of the job's state, as in every Kubernetes API."""

    type: ConditionType = Field(description="The aspect, in CamelCase.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is so.")
    reason: Annotated[
        str,
        Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"),
    ] = Field(description="Cause of the last change, in CamelCase.")
    message: Sentence = Field(description="The same in a sentence.")
    last_transition_time: Time = Field(description="Time of the last change of the status.")
    observed_generation: Counter | None = Field(
        None, description="Generation of the job that the condition is about."
    )


class LastCheckpoint(ConfigModel):
    """The newest checkpoint that is committed."""

    step: Counter = Field(description="Step after which it was saved.")
    time: Time | None = Field(None, description="Time at which it was committed.")


class ResourceStatus(ConfigModel):
    """What the controller last saw of the job. Numbers with a fraction are text, as API servers
    recommend it.
    """

    observed_generation: Counter | None = Field(
        None, description="Generation of the job that the controller has acted on."
    )
    conditions: list[Condition] = Field(
        [], max_length=16, description="Conditions, one of each type."
    )
    phase: Line | None = Field(
        None, description="What the job is doing, such as Queued, Running or Recovering."
    )
    message: Sentence | None = Field(None, description="A sentence about the phase.")
    backend: Line | None = Field(None, description="Workload kind that was chosen for the job.")
    rendezvous: Line | None = Field(None, description="Rendezvous that was chosen for the job.")
    applied_digests: list[Line] = Field(
        [],
        max_length=2,
        description="Digests of the specs that the job's objects are made from, the newest last.",
    )
    run_id: Line | None = Field(None, description="Run that the job belongs to.")
    nodes: Line | None = Field(
        None, description="Nodes that run, of those that the job has for now, such as 3/4."
    )
    replicas: Counter | None = Field(None, description="Nodes that run, for the scale subresource.")
    selector: Line | None = Field(
        None, description="Label selector of the job's pods, for the scale subresource."
    )
    world_size: Counter | None = Field(None, description="Ranks that train together.")
    step: Counter | None = Field(None, description="Step that the training has reached.")
    target_steps: Counter | None = Field(None, description="Step at which the training ends.")
    progress: Line | None = Field(None, description="Steps done, of all, in percent, such as 62%.")
    samples_seen: Counter | None = Field(
        None, description="Samples that the model has been trained with."
    )
    loss: Line | None = Field(None, description="Loss of the last steps, such as 0.2541.")
    last_checkpoint: LastCheckpoint | None = Field(
        None, description="The newest checkpoint that is committed."
    )
    avoided_nodes: list[Line] = Field(
        [],
        max_length=64,
        description="Nodes that the job's pods stay away from, until when, and why.",
    )
    node_faults: dict[Line, Counter] = Field(
        {},
        description="Number of faults of a node when the controller last avoided it for the job; 0 "
        "if it never did.",
    )
    restarts: Counter | None = Field(None, description="Restarts of the ranks since the start.")
    restarted_at: Time | None = Field(
        None, description="The `restartedAt` of the spec that has been acted on."
    )
    goodput: Line | None = Field(
        None, description="Share of the time that made lasting progress, such as 97%."
    )
    eta: Time | None = Field(None, description="Time at which the training is expected to end.")
    diagnosis: Sentence | None = Field(
        None, description="What is wrong and what to do, as `kdist why` says it."
    )


PLURAL: Final = "trainingjobs"
GROUP, _, VERSION = API_VERSION.partition("/")

_MERGED_BY: Final = {
    ("spec", "env"): "name",
    ("spec", "data"): "mountPath",
    ("status", "conditions"): "type",
}
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
    for each in ("cpu", "memory"):  # which the model adds, with GPUs a share for each of them
        del fields["spec"]["properties"]["resources"]["properties"][each]["default"]
    fields["status"] = convert(ResourceStatus.model_json_schema(by_alias=True))
    for (section, name), key in _MERGED_BY.items():
        found = fields[section]["properties"][name]
        found |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return schema
