"""What a person is told about one field: what must stand there, what was found, and the likely way out."""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from unicodedata import normalize

from pydantic_core import ErrorDetails

from kdist.load.places import Place
from kdist.load.scalars import number_hint
from kdist.load.text import shown
from kdist.load.tree import Node
from kdist.spec import fields
from kdist.spec.paths import Path, elsewhere, near_name
from kdist.spec.words import SAYS

_BYTES = re.compile(r"([0-9]+)\s*([kKmMgGtT])(i?)[bB]?\Z")
_NO_NAME = re.compile(r"[^a-z0-9]+")


class Sentence(NamedTuple):
    """What is wrong, what may have been meant, and how to repair it."""

    message: str
    suggestion: str = ""
    hint: str = ""


def about_missing(path: Path) -> Sentence:
    """A field that must be there."""
    field = fields.find(path)
    return Sentence("is required", hint=field.sentence if field else "")


def about_unknown(path: Path) -> Sentence:
    """A field that the model does not have: a near name beside it, the same name elsewhere, or the names there are."""
    section, name = fields.find(path[:-1]), str(path[-1])
    names = list(section.children) if section else []
    near = near_name(name, names)
    if near:
        return Sentence("unknown field", near)
    home = elsewhere(name)
    if home:
        return Sentence("unknown field", hint=f"it belongs to `{home.rsplit('.', 1)[0]}`: {home}")
    listed = ", ".join(names)
    return Sentence("unknown field", hint=f"known here: {listed}" if len(listed) <= 300 else "")


def about_value(error: ErrorDetails, place: Place, *, of_key: bool = False) -> Sentence:
    """A value that does not fit its field."""
    kind, context = error["type"], error.get("ctx", {})
    field = fields.find(place.path)
    node = place.node
    if of_key:
        return Sentence(f"as a key {_of_text(kind, context)}")
    if node is None or field is None:  # no field of ours has such an error today
        return Sentence(f"does not fit: {error['msg']}")
    if node.kind == "scalar" and node.scalar is None and not node.text:
        return Sentence(f"is empty, must be {field.words}", hint="give a value, or delete the line")
    if kind in ("too_long", "too_short"):
        return Sentence(_of_length(context))
    if kind in ("string_too_long", "string_too_short", "string_pattern_mismatch"):
        says = f"must be {field.words}" if len(field.forms) > 1 else _of_text(kind, context)
        return Sentence(f"{says}, found {_found(node)}", _repaired(field, node.text))
    suggestion = near_name(str(node.text), field.choices) if field.choices and node.kind == "scalar" else ""
    return Sentence(f"must be {field.words}, found {_found(node)}", suggestion, "" if suggestion else _hint(node, field))


def _of_text(kind: str, context: dict[str, Any]) -> str:
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters"
    if kind == "string_too_short":
        return "must not be empty"
    return SAYS.get(str(context.get("pattern")), "has a form that is not allowed")


def _of_length(context: dict[str, Any]) -> str:
    """Pydantic's words for a list or mapping with too many or too few entries."""
    if "max_length" in context:
        return f"must have at most {context['max_length']} entries, found {context.get('actual_length') or 'more'}"
    return f"must have at least {context['min_length']} entries, found {context.get('actual_length')}"


def _found(node: Node) -> str:
    """What stands in the file, as a noun."""
    if node.kind == "mapping":
        return "a mapping" if node.entries else "an empty mapping"
    if node.kind == "list":
        return f"a list of {len(node.items)}" if node.items else "an empty list"
    value = shown(node.text)
    if isinstance(node.scalar, str):
        return f"the text `{value}`" if value else "empty text"
    if isinstance(node.scalar, bool):
        return f"the boolean {value}"
    return "nothing (null)" if node.scalar is None else f"the number {value}"


def _hint(node: Node, field: fields.Field) -> str:
    """The way out, where what was written tells what was meant."""
    if node.kind != "scalar":
        return ""
    if isinstance(node.scalar, str):
        number = any(form.get("type") in ("integer", "number") for form in field.forms)
        return number_hint(node.text, plain=node.plain) if number else ""
    if node.scalar is None:
        return "give a value, or delete the line"
    if isinstance(node.scalar, float) and node.scalar.is_integer() and not field.takes_text and abs(node.scalar) < 2**53:
        return f"write {int(node.scalar)}"
    pattern = field.forms[0].get("pattern", "")
    if field.takes_text and not field.choices and re.match(pattern, node.text):
        return (
            f'without quotes YAML takes it for a {"boolean" if isinstance(node.scalar, bool) else "number"}; write "{node.text}"'
        )
    return ""


def _repaired(field: fields.Field, text: str) -> str:
    """The name or quantity that a wrong one is close to; empty if there is none that the field takes."""
    pattern, longest = field.forms[0].get("pattern", ""), field.forms[0].get("maxLength", 0)
    size = _BYTES.match(text)
    plain = normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    tries = [
        f"{size[1]}{size[2].upper()}i" if size else "",
        _NO_NAME.sub("-", plain).strip("-"),
        re.sub(r"[^A-Za-z0-9]", "_", text),
    ]
    if "/" in text or re.match(pattern, "a/b") or not re.search("[A-Za-z0-9]", text):  # references and paths are not guessed
        tries = tries[:1]
    return next((each for each in tries if each and each != text and len(each) <= longest and re.match(pattern, each)), "")
