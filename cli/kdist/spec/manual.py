"""The manual of job.yaml's fields: as text for `kdist explain`, as a Markdown table for the documentation, as plain values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from kdist.spec.fields import Field

_WIDTH = 100


def describe(field: Field, *, recursive: bool = False) -> str:
    """A field as `kdist explain` shows it: what it is, its limits, its default, and the fields below it."""
    lines = [f"FIELD:    {field.path or 'the whole file'}", *_wrapped("TYPE:     ", _type(field))]
    lines += _wrapped("DEFAULT:  ", default_words(field))
    if field.sentence:
        lines += ["", *wrap(_opening(field), _WIDTH)]
    below = list(_below(field, recursive=recursive))
    if below:
        width = min(max(len(name) for name, _ in below), 44)
        lines += ["", "FIELDS:"]
        for name, child in below:
            lines.append(f"  {name:<{width}}  <{_short(child)}>{_marks(child)}")
            lines += wrap(child.sentence, _WIDTH, initial_indent=" " * (width + 4), subsequent_indent=" " * (width + 4))
    return "\n".join(lines)


def table(field: Field) -> str:
    """The fields below `field` as a Markdown table."""
    rows = ["| field | type | default | what it is |", "|---|---|---|---|"]
    for child in field.walk():
        cells = (f"`{child.path}`", _type(child), _as_code(default_words(child)), child.sentence)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def document(field: Field, *, recursive: bool = False) -> dict[str, Any]:
    """A field as plain values, its children the same."""
    value: dict[str, Any] = {
        "path": field.path,
        "type": _type(field),
        "required": field.required,
        "default": field.default,
        "choices": field.choices,
        "description": field.sentence,
    }
    if field.children or field.item is not None:
        inner = field.children or (field.item.children if field.item else {})
        value["fields"] = [
            document(child, recursive=True) if recursive else {"path": child.path, "description": child.sentence}
            for child in inner.values()
        ]
    return value


def default_words(field: Field) -> str:
    """The default as it would be written; `required` and `none` where there is no such thing."""
    if field.required:
        return "required"
    return "none" if field.default is None else json.dumps(_without_none(field.default), ensure_ascii=False)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value


def _type(field: Field) -> str:
    item = field.item
    if item is not None and field.words == "a list":
        return f"a list; each item is {item.words}"
    return field.words


def _short(field: Field) -> str:
    """The kind of value in one or two words."""
    kinds = dict.fromkeys(str(form.get("type", "choice" if "const" in form or "enum" in form else "any")) for form in field.forms)
    names = {"integer": "int", "string": "text", "object": "mapping", "array": "list"}
    return " or ".join(field.choices if field.choices and len(kinds) == 1 else [names.get(kind, kind) for kind in kinds])


def _marks(field: Field) -> str:
    words = default_words(field)
    return " required" if words == "required" else "" if words == "none" or len(words) > 40 else f" default {words}"


def _below(field: Field, *, recursive: bool) -> Iterator[tuple[str, Field]]:
    start = len(field.path) + 1 if field.path else 0
    if recursive:
        yield from ((child.path[start:], child) for child in field.walk())
        return
    children = field.children or (field.item.children if field.item is not None else {})
    yield from ((child.name, child) for child in children.values())


def _opening(field: Field) -> str:
    """The sentence as it stands alone: without its own `name:`, and with a capital unless it opens with a camelCase name."""
    text = field.sentence.removeprefix(f"{field.name}: ")
    return text if text.startswith(field.name) and not field.name.islower() else text[:1].upper() + text[1:]


def _wrapped(head: str, text: str) -> list[str]:
    return wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def _as_code(words: str) -> str:
    return words if words in ("required", "none") else f"`{words}`"
