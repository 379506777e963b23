"""The CustomResourceDefinition is the model's, within what Kubernetes allows of a structural
schema; tests/cluster sends it and every job to an API server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kdist.crd import definition
from kdist.crd.definition import convert
from kdist.job_file import load_text
from kdist.spec import reference
from kdist.status import Phase
from tests.cli.conftest import Kdist
from tests.manifests.jobs import EXAMPLES, example, full

Schema = dict[str, Any]
DEFINITION = definition.definition()
(VERSION,) = DEFINITION["spec"]["versions"]
SCHEMA: Schema = VERSION["schema"]["openAPIV3Schema"]
SPEC: Schema = SCHEMA["properties"]["spec"]
KEEP, NUMBER_OR_TEXT = "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"
# JSONSchemaProps of apiextensions.k8s.io/v1, as far as a structural schema may have them
ALLOWED = {
    *("type", "format", "description", "default", "properties", "items", "required", "enum"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "nullable"),
    *("minLength", "maxLength", "minItems", "maxItems", "maxProperties", "additionalProperties"),
    *(KEEP, NUMBER_OR_TEXT),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
}


def walk(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema in a schema, with its path as `kdist explain` writes it."""
    yield path, node
    for name, each in node.get("properties", {}).items():
        yield from walk(each, f"{path}.{name}" if path else name)
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if key in node:
            yield from walk(node[key], path + mark)


NODES = dict(walk(SCHEMA))


def fill(value: Any, node: Schema) -> Any:
    """What an API server stores: without nulls, with defaults, without unknown fields."""
    if isinstance(value, dict) and "properties" in node:
        given = {key: each for key, each in value.items() if each is not None}
        defaults = {
            key: each["default"] for key, each in node["properties"].items() if "default" in each
        }
        known = {**defaults, **given}.items()
        return {
            key: fill(each, node["properties"][key])
            for key, each in known
            if key in node["properties"]
        }
    if isinstance(value, list) and "items" in node:
        return [fill(each, node["items"]) for each in value]
    return value


def test_every_field_has_one_type_or_keeps_what_it_is_given() -> None:
    assert len(NODES) > 150
    for path, node in NODES.items():
        assert set(node) <= ALLOWED, path
        kinds = [key for key in ("type", KEEP, NUMBER_OR_TEXT) if key in node]
        assert kinds in ([kinds[0]], ["type", KEEP]), path
        assert not {"properties", "additionalProperties"} <= set(node), path
        for key in ("exclusiveMinimum", "exclusiveMaximum"):
            assert node.get(key) in (None, True), path
        if node.get("type") == "object" and not path.endswith("[]") and path != "metadata":
            assert node["description"].endswith("."), path


def test_the_api_server_takes_the_names_of_error_types() -> None:
    pattern = NODES["spec.restart.rules[].onErrors[]"]["pattern"]
    word = re.escape(r"[\pL\pM\p{Nd}\p{Pc}]")
    assert not re.search(rf"\[[^]]*{word}", pattern), "Go has no class in a class"
    name = re.compile(re.sub(word, r"\\w", pattern))
    assert all(map(name.match, ("ValueError", "torch.OutOfMemoryError")))
    assert not name.match("torch.")
    with pytest.raises(ValueError, match="class"):
        convert({"type": "string", "pattern": r"^[a-z\w]$"})


@pytest.mark.parametrize("field", list(reference.root().walk()), ids=lambda field: field.path)
def test_a_limit_of_the_model_is_the_api_servers_too(field: reference.Field) -> None:
    if field.path.startswith("metadata.") or field.path not in NODES:
        outer = NODES.get(re.sub(r"(\.\*|\[\]|\.[^.]*)$", "", field.path), {KEEP: True})
        assert field.path.startswith("metadata.") or KEEP in outer or "items" in outer
        return
    node, forms = NODES[field.path], [form for form in field.forms if form.get("type") != "object"]
    assert node.get("description", field.description) == " ".join(field.description.split())
    for form in forms if KEEP not in node else []:
        for key in ("minimum", "maximum", "minLength", "maxLength", "maxItems", "maxProperties"):
            assert node.get(key, form.get(key)) == form.get(key, node.get(key)), key
        if "exclusiveMinimum" in form:
            assert (node["minimum"], node["exclusiveMinimum"]) == (form["exclusiveMinimum"], True)
        if "enum" in form:
            assert node["enum"] == form["enum"]


@pytest.mark.parametrize("name", [*EXAMPLES, "full"])
def test_defaults_of_the_api_server_do_not_change_what_a_file_says(name: str) -> None:
    document = full() if name == "full" else yaml.safe_load(EXAMPLES[name].read_text())
    if name != "full":
        document["spec"]["image"] = example(EXAMPLES[name]).spec.image
    stored = {**document, "spec": fill(document["spec"], SPEC)}
    assert stored["spec"]["threadsPerRank"], "a default was written"
    assert set(document["spec"]) <= set(stored["spec"]), "no field was dropped"
    expected = load_text(json.dumps(document), source="file")
    assert load_text(json.dumps(stored), source="API server") == expected


@pytest.mark.parametrize("name", [*EXAMPLES, "full"])
def test_a_job_with_all_defaults_written_out_loses_nothing_on_the_api_server(name: str) -> None:
    document = full() if name == "full" else None
    job = load_text(json.dumps(document), source="full") if document else example(EXAMPLES[name])
    written = job.to_document()
    stored = {**written, "spec": fill(written["spec"], SPEC)}
    assert load_text(json.dumps(stored), source="API server") == job


def test_columns_and_scale_read_what_the_controller_writes() -> None:
    columns = VERSION["additionalPrinterColumns"]
    shown = [each["name"].upper() for each in columns if each["priority"] == 0]
    assert shown == ["PHASE", "NODES", "STEP", "PROGRESS", "LOSS", "RESTARTS", "AGE"]
    assert [each["name"] for each in columns if each["priority"]] == [
        "Backend",
        "Checkpoint",
        "Message",
    ]
    for each in columns[:-4] + columns[-3:]:
        assert NODES[each["jsonPath"][1:]]["type"] == each["type"]
    scale = VERSION["subresources"]["scale"]
    assert [NODES[path[1:]]["type"] for path in scale.values()] == ["integer", "integer", "string"]
    assert scale["specReplicasPath"] == ".spec.replicas"


def test_phases_of_kdist_fit_the_status() -> None:
    longest = NODES["status.phase"]["maxLength"]
    assert all(len(phase) <= longest for phase in Phase)


def test_the_definition_is_printed_as_yaml(kdist: Kdist) -> None:
    assert yaml.safe_load(kdist("explain", "-o", "crd").stdout) == DEFINITION
    refused = kdist("explain", "-o", "crd", "spec")
    assert refused.exit_code == 2
    assert "-o crd describes the whole file" in refused.stderr


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"type": "integer", "maximum": 2**53}, {"type": "integer", "format": "int64"}),
        ({"const": "auto", "type": "string"}, {"type": "string", "enum": ["auto"]}),
        (
            {"type": "number", "exclusiveMaximum": 1},
            {"type": "number", "maximum": 1, "exclusiveMaximum": True},
        ),
        (
            {"type": "array", "prefixItems": [{"type": "number"}] * 2, "minItems": 2},
            {"type": "array", "items": {"type": "number"}, "minItems": 2},
        ),
        (
            {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "object", "properties": {}}]},
            {KEEP: True, "minimum": 1},
        ),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"type": "string"}),
        (
            {"type": "object", "patternProperties": {"^a$": {"type": "string"}}},
            {"type": "object", "additionalProperties": {"type": "string"}},
        ),
    ],
)
def test_words_of_json_schema_become_those_of_openapi(written: Schema, expected: Schema) -> None:
    converted = convert(written)
    assert {key: converted.get(key) for key in expected} == expected
    assert set(converted) <= ALLOWED


def test_what_is_in_a_list_has_no_defaults() -> None:
    """Argo CD and Flux would compare the list with one that they have not sent, for ever."""

    def find_defaults(schema: Schema, *, inside: bool) -> Iterator[Schema]:
        if inside and "default" in schema:
            yield schema
        for key, each in schema.items():
            if isinstance(each, dict):
                yield from find_defaults(each, inside=inside or key == "items")

    assert list(find_defaults(SCHEMA, inside=False)) == []
    assert SPEC["properties"]["logs"]["properties"]["keep"]["default"]


def test_the_server_leaves_the_share_of_a_gpu_to_the_model() -> None:
    resources = SPEC["properties"]["resources"]["properties"]
    assert {name for name, field in resources.items() if "default" in field} == {"gpu"}


def test_what_no_structural_schema_can_say_is_not_dropped_in_silence() -> None:
    with pytest.raises(ValueError, match="no structural schema has oneOf"):
        convert({"type": "object", "oneOf": []})
