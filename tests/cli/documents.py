"""What commands print with `-o json`, compared with docs/reference/output.schema.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.house.tree import ROOT

SCHEMA: dict[str, Any] = json.loads((ROOT / "docs/reference/output.schema.json").read_text())
KEYWORDS = {
    *("$ref", "additionalProperties", "anyOf", "enum", "items", "properties", "required", "type"),
    "description",
}
"""What `wrong` understands."""
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def read(printed: str) -> list[dict[str, Any]]:
    """The documents in a text, one after the other, each as its schema says."""
    found, rest = [], printed.strip()
    while rest:
        document, end = json.JSONDecoder().raw_decode(rest)
        findings = list(wrong(document, {"$ref": f"#/$defs/{document['kind']}"}))
        assert not findings, (document["kind"], findings)
        found.append(document)
        rest = rest[end:].lstrip()
    assert found, "no document"
    return found


def wrong(value: Any, schema: dict[str, Any], at: str = "$") -> Iterator[str]:
    """Where a value is not what a schema says."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema:
        findings = [list(wrong(value, each, at)) for each in schema["anyOf"]]
        if [] not in findings:
            yield from max(findings, key=lambda each: max(map(len, each)))
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is not one of {schema['enum']}"
    kinds = _TYPES.get(schema.get("type", ""), (object,))
    fits = isinstance(value, kinds)
    if not fits or (isinstance(value, bool) and not {bool, object} & {*kinds}):
        yield f"{at}: {value!r} is no {schema['type']}"
        return
    for number, each in enumerate(value if "items" in schema else ()):
        yield from wrong(each, schema["items"], f"{at}[{number}]")
    if schema.get("type") != "object":
        return
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at}.{name} is missing"
    for name, each in value.items():
        if name not in properties and more is False:
            yield f"{at}.{name} is not in the schema"
            continue
        yield from wrong(each, properties.get(name, more or {}), f"{at}.{name}")
