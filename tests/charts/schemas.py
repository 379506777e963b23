"""Schemas for kubeconform, made of what an API server says of itself, so that none has to be
fetched from elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Document = dict[str, Any]

_PLACE = "{{ .Group }}/{{ .ResourceKind }}_{{ .ResourceAPIVersion }}.json"
_REFERENCE = "#/definitions/"


def write_schemas(openapi: Document, folder: Path) -> str:
    """Write a strict schema for each kind of an OpenAPI v2 document; returns kubeconform's
    `-schema-location`.
    """
    definitions = openapi["definitions"]
    for definition in definitions.values():
        for kind in definition.get("x-kubernetes-group-version-kind", []):
            path = (
                folder
                / (kind["group"] or kind["version"])
                / f"{kind['kind'].lower()}_{kind['version']}.json"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            needed: Document = {}
            schema = _strict(definition, definitions, needed)
            path.write_text(json.dumps({**schema, "definitions": needed}))
    return f"{folder}/{_PLACE}"


def _strict(value: Any, definitions: Document, needed: Document) -> Any:
    """The same schema with no field allowed but those that are named; definitions that it refers
    to are gathered in `needed`.
    """
    if isinstance(value, list):
        return [_strict(each, definitions, needed) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        name = value["$ref"].removeprefix(_REFERENCE)
        if name not in needed:
            needed[name] = {}
            needed[name] = _strict(definitions[name], definitions, needed)
        return {"$ref": _REFERENCE + name}
    if value.get("x-kubernetes-int-or-string") or value.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    found = {
        key: _strict(each, definitions, needed)
        for key, each in value.items()
        if key not in ("description", "properties")
    }
    if "properties" in value:  # whose keys are names of fields, as CRDs' own `description` is
        found["properties"] = {
            field: _strict(schema, definitions, needed)
            for field, schema in value["properties"].items()
        }
        if not value.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    return found
