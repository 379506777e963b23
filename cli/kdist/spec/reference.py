"""The reference of job.yaml's fields: the JSON Schema, and each field's type, default, limits and
description, as text for `kdist explain`, as a Markdown table, and as plain values.

`kdist explain`, `kdist init`, the documentation and the problems of a file all read the fields from
here, so they always match the models.

It also formats and parses paths to fields, and suggests the path that a misspelled one was meant to
be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from textwrap import wrap
from typing import Any, Final, TypeAlias

from kdist.spec.models import PATTERN_MESSAGES
from kdist.spec.training_job import TrainingJob
from kdist_trainer.formats.json_text import encode_json

SCHEMA_ID: Final = "https://kdist.dev/schemas/v1alpha1/job.schema.json"


@cache
def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of job.yaml. Cached: callers must not change it."""
    document = TrainingJob.model_json_schema(by_alias=True)
    _tidy(document)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "TrainingJob of kdist",
    }
    return head | document


def _tidy(node: Any) -> None:
    """Remove pydantic's generated titles, which only repeat names, and forbid other keys in
    mappings whose keys follow a pattern.
    """
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        if "patternProperties" in node:
            node["additionalProperties"] = False
        for each in node.values():
            _tidy(each)
    elif isinstance(node, list):
        for each in node:
            _tidy(each)


class Field:
    """One field of job.yaml, with its schema references resolved. `path` is dotted, with `[]` for a
    list's items: `spec.env[].name`.
    """

    def __init__(self, path: str, node: dict[str, Any], *, required: bool) -> None:
        self.path = path
        self.required = required
        self._node = node
        forms = [_resolved(form) for form in _resolved(node).get("anyOf", [_resolved(node)])]
        self.forms = [form for form in forms if form.get("type") != "null"]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit(".", 1)[-1]

    @property
    def description(self) -> str:
        """What the field is for, in a sentence."""
        return str(self._node.get("description", ""))

    @property
    def default(self) -> Any:
        """The default as it would be written in the file; None if no value has the meaning of an
        absent field.
        """
        return self._node.get("default")

    @property
    def type_text(self) -> str:
        """The type and its limits, worded to follow "must be"."""
        return " or ".join(dict.fromkeys(describe_type(form) for form in self.forms))

    @property
    def choices(self) -> list[str]:
        """The allowed values of an enumeration; empty for other fields."""
        return [str(word) for form in self.forms for word in _choices(form)]

    @property
    def takes_text(self) -> bool:
        """True if the value may be text."""
        return any(form.get("type") == "string" for form in self.forms)

    @property
    def takes_only_text(self) -> bool:
        """True if the value must be text, so that a plain 012 has to be quoted."""
        return all(form.get("type") == "string" for form in self.forms)

    @property
    def is_free(self) -> bool:
        """True if the value may be any JSON value."""
        return self.forms == [{}]

    @cached_property
    def children(self) -> dict[str, Field]:
        """The fields of a section, in the order of the model; empty for values, lists and free
        mappings.
        """
        return {
            name: Field(
                f"{self.path}.{name}" if self.path else name,
                node,
                required=name in form.get("required", []),
            )
            for form in self.forms
            for name, node in form.get("properties", {}).items()
        }

    @property
    def below(self) -> dict[str, Field]:
        """The fields of a section, or of a list's items."""
        return self.children or (self.item.children if self.item is not None else {})

    @cached_property
    def item(self) -> Field | None:
        """The items of a list; None if this is not a list."""
        for form in self.forms:
            kinds = [form["items"]] if "items" in form else form.get("prefixItems", [])
            if kinds:
                return Field(f"{self.path}[]", kinds[0], required=False)
        return self.entry if self.is_free else None

    @cached_property
    def entry(self) -> Field | None:
        """The values of a mapping with arbitrary keys; None if this is not one."""
        if self.is_free:
            return Field(f"{self.path}.*", {}, required=False)
        for form in self.forms:
            if form.get("type") == "object" and "properties" not in form:
                free = next(
                    iter(form.get("patternProperties", {}).values()),
                    form.get("additionalProperties", {}),
                )
                return Field(
                    f"{self.path}.*", free if isinstance(free, dict) else {}, required=False
                )
        return None

    def walk(self) -> Iterator[Field]:
        """Yield all nested fields, parents before children."""
        for child in self.children.values():
            yield child
            yield from child.walk()
        if self.item is not None:
            yield from self.item.walk()


@cache
def root() -> Field:
    """The whole file, as a field with an empty path."""
    return Field("", schema(), required=True)


def find(path: Sequence[str | int]) -> Field | None:
    """The field at a path of names and list indices; None if there is none."""
    field: Field | None = root()
    for part in path:
        if field is None:
            return None
        field = field.item if isinstance(part, int) else field.children.get(part, field.entry)
    return field


REMOVED = {"spec.standby": "remove the line: lost ranks are replaced quickly without it"}
"""Fields of earlier versions, and what to do instead."""


def look_up(dotted: str) -> Field | None:
    """The field with this dotted path, or None: `spec.env[].name`, `spec.env[0].name` and
    `spec.env.name` are the same.
    """
    field: Field | None = root()
    plain = re.sub(r"\[[0-9]*\]", "", dotted.strip("."))
    for part in plain.split(".") if dotted.strip(".") else ():
        if field is None:
            return None
        inner = field.item
        below = inner.children.get(part) if inner is not None else None
        field = field.children.get(part) or below
    return field


def schema_text() -> str:
    """The JSON Schema as the text of a file."""
    return encode_json(schema(), indent=2, ensure_ascii=False) + "\n"


def describe_type(form: dict[str, Any]) -> str:
    """One of the types that a field may have, in words."""
    choices = _choices(form)
    if choices:
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    kind = form.get("type")
    if kind == "integer":
        return "a whole number" + _limits(form)
    if kind == "number":
        return "a number" + _limits(form)
    if kind == "string":
        message = PATTERN_MESSAGES.get(form.get("pattern", ""), "")
        return message.removeprefix("must be ") if message.startswith("must be ") else "text"
    if kind == "array":
        return (
            f"a list of {len(form['prefixItems'])} numbers" if "prefixItems" in form else "a list"
        )
    if kind == "boolean":
        return "true or false"
    if kind == "object":
        names = list(form.get("properties", {}))
        return "{" + ", ".join(names) + "}" if 0 < len(names) <= 5 else "a mapping"
    return "a value"


def _limits(form: dict[str, Any]) -> str:
    low, above = form.get("minimum"), form.get("exclusiveMinimum")
    high, below = form.get("maximum"), form.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {_number(low)} to {_number(high)}"
    parts = [
        (" greater than", above),
        (" at least", low),
        (" at most", high),
        (" less than", below),
    ]
    return " and".join(f"{word} {_number(limit)}" for word, limit in parts if limit is not None)


def _number(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _choices(form: dict[str, Any]) -> list[Any]:
    choices: list[Any] = form.get("enum", [form["const"]] if "const" in form else [])
    return ["true" if choice is True else choice for choice in choices]


def _resolved(node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    if reference is None:
        return node
    definition: dict[str, Any] = schema()["$defs"][str(reference).rsplit("/", 1)[-1]]
    return definition


_WIDTH = 100


def describe(field: Field, *, recursive: bool = False) -> str:
    """A field as `kdist explain` shows it: type and limits, default, description, and its own
    fields.
    """
    lines = [f"FIELD:    {field.path or 'the whole file'}", *_wrapped("TYPE:     ", _type(field))]
    lines += _wrapped("DEFAULT:  ", default_words(field))
    if field.description:
        lines += ["", *wrap(field.description, _WIDTH)]
    below = list(_below(field, recursive=recursive))
    if below:
        width = min(max(len(name) for name, _ in below), 44)
        lines += ["", "FIELDS:"]
        for name, child in below:
            lines.append(f"  {name:<{width}}  <{_short(child)}>{_marks(child)}")
            lines += wrap(
                child.description,
                _WIDTH,
                initial_indent=" " * (width + 4),
                subsequent_indent=" " * (width + 4),
            )
    return "\n".join(lines)


def table(field: Field) -> str:
    """All fields nested in `field` as a Markdown table."""
    rows = ["| field | type | default | description |", "|---|---|---|---|"]
    for child in field.walk():
        words = default_words(child)
        default = words if words in ("required", "none") else f"`{words}`"
        cells = (f"`{child.path}`", _type(child), default, child.description)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def document(field: Field, *, recursive: bool = False) -> dict[str, Any]:
    """A field and its children as plain values."""
    value: dict[str, Any] = {
        "path": field.path,
        "type": _type(field),
        "required": field.required,
        "default": field.default,
        "choices": field.choices,
        "description": field.description,
    }
    if field.children or field.item is not None:
        inner = field.below
        value["fields"] = [
            document(child, recursive=True)
            if recursive
            else {"path": child.path, "description": child.description}
            for child in inner.values()
        ]
    return value


def default_words(field: Field) -> str:
    """The default as it would be written, or `required`, or `none`."""
    if field.required:
        return "required"
    if field.default is None:
        return "none"
    return encode_json(_without_none(field.default), ensure_ascii=False)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value


def _type(field: Field) -> str:
    item = field.item
    if item is not None and field.type_text == "a list":
        return f"a list; each item is {item.type_text}"
    return field.type_text


def _short(field: Field) -> str:
    """The kind of value in one or two words."""
    kinds = dict.fromkeys(
        str(form.get("type", "choice" if "const" in form or "enum" in form else "any"))
        for form in field.forms
    )
    names = {"integer": "int", "string": "text", "object": "mapping", "array": "list"}
    return " or ".join(
        field.choices
        if field.choices and len(kinds) == 1
        else [names.get(kind, kind) for kind in kinds]
    )


def _marks(field: Field) -> str:
    words = default_words(field)
    if words == "required":
        return " required"
    return "" if words == "none" or len(words) > 40 else f" default {words}"


def _below(field: Field, *, recursive: bool) -> Iterator[tuple[str, Field]]:
    start = len(field.path) + 1 if field.path else 0
    if recursive:
        yield from ((child.path[start:], child) for child in field.walk())
        return
    yield from ((child.name, child) for child in field.below.values())


def _wrapped(head: str, text: str) -> list[str]:
    return wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


Path: TypeAlias = tuple[str | int, ...]
_PART = re.compile(
    r"""\.?(?:(?P<name>[^.\[\]"'=\s]+)|\[(?P<index>[0-9]{1,6})\]|\[(?P<quote>["'])(?P<key>[^"']+)(?P=quote)\])"""
)
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


def show(path: Sequence[str | int]) -> str:
    """`("spec", "env", 0, "name")` → `spec.env[0].name`; other keys are quoted in
    brackets.
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.match(part) and len(part) <= 64:
            text += f".{part}" if text else part
        else:
            clean = "".join(char if char.isprintable() else "?" for char in part[:64])
            text += f'["{clean}"]'
    return text


def parse(text: str) -> Path | None:
    """`a.b[0]` → `("a", "b", 0)`; None if it is not a path."""
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        found = _PART.match(text, position)
        if found is None or (position == 0 and text[0] == "."):
            return None
        parts.append(int(found["index"]) if found["index"] else found["name"] or found["key"])
        position = found.end()
    return tuple(parts) or None


def near_name(word: str, names: Iterable[str]) -> str:
    """The name that is similar to a word, ignoring case and separators; empty if there is none."""
    from difflib import get_close_matches

    by_letters = {_letters(name): name for name in names}
    letters = _letters(word[:64])
    prefixed = [
        name
        for known, name in by_letters.items()
        if min(len(known), len(letters)) >= 3
        and (letters.startswith(known) or known.startswith(letters))
    ]
    near = get_close_matches(letters, by_letters, n=1, cutoff=0.7)
    return by_letters[near[0]] if near else prefixed[0] if len(prefixed) == 1 else ""


def near_path(path: Sequence[str | int]) -> str:
    """The path that a misspelled one was probably meant as: a similar name in the section, else the
    same name in another section; empty if there is none.
    """
    good: list[str | int] = []
    for index, part in enumerate(path):
        field = find(good)
        if field is None:
            return ""
        known = isinstance(part, int) or part in field.children or field.entry is not None
        if known:
            good.append(part)
            continue
        near = near_name(str(part), field.children)
        if near:
            whole = [*good, near, *path[index + 1 :]]
            return show(whole if find(whole) else [*good, near])
        return elsewhere(str(part))
    return ""


def elsewhere(name: str) -> str:
    """Path of the only field of that name in the whole file; empty if there is none or several."""
    found = [field.path for field in root().walk() if _letters(field.name) == _letters(name)]
    return found[0] if len(found) == 1 else ""


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()
