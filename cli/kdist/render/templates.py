"""Renders templates to objects: writes values safely, and parses the result with the origin of each
value.

Templates in `manifests/` write every value as JSON (`as_json`, Jinja's `finalize`), which is also
YAML, so that no value can add a key, a line or an object; the output is parsed into objects.
Undefined names are errors. A value that a template takes with
`field("spec.image")` or marks with `| of("spec.image")` travels as the YAML tag `!from`, so that
each leaf of the parsed document knows which field of job.yaml it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from kdist.errors import KdistError
from kdist.manifest import Manifest, to_json
from kdist.yaml_text import parse_yaml

TEMPLATES = Path(__file__).parent.parent / "manifests"


@dataclass(frozen=True)
class TracedValue:
    """A value and the field of job.yaml that it comes from."""

    value: Any
    source: str


@dataclass(frozen=True)
class Fragment:
    """A document of another template, which is rendered once and inserted where templates name
    it.
    """

    name: str
    document: Any = None


def as_json(value: object) -> str:
    """`value` as JSON that all YAML parsers read in the same way; Jinja's `finalize`.

    Raises `ValueError` for NaN and infinity, `TypeError` for unsupported types, and
    `jinja2.UndefinedError` for undefined names.
    """
    if isinstance(value, jinja2.Undefined):
        return str(value)  # StrictUndefined raises here
    if isinstance(value, TracedValue):
        return (
            f"!from {{{as_json('source')}: {as_json(value.source)}, {as_json('value')}: "
            f"{as_json(value.value)}}}"
        )
    if isinstance(value, Fragment):
        return f"!part {as_json(value.name)}"
    if isinstance(value, Mapping):
        entries = (f"{as_json(str(key))}: {as_json(item)}" for key, item in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_json(item) for item in value) + "]"
    text = to_json(value)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as text
    return text


def trace_value(value: Any, source: str) -> Any:
    """`value` with every leaf traced to `source`; mappings and lists stay mappings and lists."""
    if isinstance(value, Mapping):
        return {key: trace_value(item, source) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [trace_value(item, source) for item in value]
    return value if isinstance(value, TracedValue) else TracedValue(value, source)


def _construct(loader: Any, node: Any) -> Any:
    marked = loader.construct_mapping(node, deep=True)
    return trace_value(marked["value"], marked["source"])


def _fill(value: Any, parts: Mapping[str, Any]) -> Any:
    """`value` with its fragments replaced by their documents."""
    if isinstance(value, Fragment):
        return parts[value.name]
    if isinstance(value, dict):
        return {key: _fill(item, parts) for key, item in value.items()}
    return [_fill(item, parts) for item in value] if isinstance(value, list) else value


_TAGS = {"!from": _construct, "!part": lambda loader, node: Fragment(loader.construct_scalar(node))}


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=as_json,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the output is YAML; as_json escapes values
    )
    # Jinja's function `namespace` must not replace a missing value
    environment.globals.clear()
    environment.filters = {"of": TracedValue}
    return environment


def read_template(name: str, values: Mapping[str, Any]) -> list[Any]:
    """The documents of the template `name`, with traced values. Raises `KdistError` if it cannot be
    rendered.
    """
    try:
        text = _environment().get_template(name).render(values)
        documents = [each for each in parse_yaml(text, tags=_TAGS) if each is not None]
    except (jinja2.TemplateError, ValueError, TypeError, AttributeError) as error:
        raise KdistError(f"manifests/{name} cannot be rendered: {error}") from error
    parts = {value.name: value.document for value in values.values() if isinstance(value, Fragment)}
    return [_fill(each, parts) for each in documents] if parts else documents


def render_template(name: str, values: Mapping[str, Any]) -> list[Manifest]:
    """The objects of the template `name`. Raises `KdistError` if it gives anything else."""
    documents = read_template(name, values)
    try:
        return [to_manifest(document) for document in documents]
    except (ValueError, AttributeError) as error:
        raise KdistError(f"manifests/{name} cannot be rendered: {error}") from error


def to_manifest(marked: Any) -> Manifest:
    """The object of a document of traced values, and the origin of each leaf. Raises `ValueError`
    if it is not a complete object.
    """
    sources: dict[tuple[str | int, ...], str] = {}
    return Manifest(untrace(marked, sources), sources)


def untrace(
    value: Any, sources: dict[tuple[str | int, ...], str], path: tuple[str | int, ...] = ()
) -> Any:
    """A document of traced values as plain ones; the origin of each leaf is added to `sources`."""
    if isinstance(value, TracedValue):
        sources[path] = value.source
        return value.value
    if isinstance(value, dict):
        return {key: untrace(item, sources, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [untrace(item, sources, (*path, index)) for index, item in enumerate(value)]
    return value
