"""Converts a JSON Schema of pydantic into the structural schema of a CustomResourceDefinition: one
type for each field, no references, and OpenAPI 3.0's words.

A field of several types, such as `nodes`, has none in the result and keeps unknown fields; the
limits of its types stay, because a limit on numbers does not concern a mapping. A whole number or
text is a type of its own in Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

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


def convert(document: Mapping[str, Any], name: str = "") -> Schema:
    """Convert a JSON Schema.

    Args:
        document: the schema, as `model_json_schema` returns it.
        name: the definition in it to convert; the whole schema if empty.

    Returns:
        The structural schema.

    Raises:
        ValueError: it has a keyword that no structural schema can express.
    """
    definitions = document.get("$defs", {})
    return _convert(definitions[name] if name else document, definitions)


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
        schema |= _free_mapping(form, definitions)
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


def _free_mapping(form: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """A mapping with keys of the user; patterns of keys have no equivalent."""
    values = [*form.get("patternProperties", {}).values(), form.get("additionalProperties")]
    value = _convert(values[0], definitions) if isinstance(values[0], Mapping) else {_KEEP: True}
    return {_KEEP: True} if value == {_KEEP: True} else {"additionalProperties": value}


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
