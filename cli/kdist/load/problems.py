"""Validation errors of the model as problems with a place in the file: what the field expects, what
was found, and the likely fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unicodedata import normalize

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kdist.errors import Problem
from kdist.load.scalars import number_hint
from kdist.load.text import shown
from kdist.load.yaml_parser import Mark, YamlNode
from kdist.spec import Spec, reference
from kdist.spec.models import SAYS
from kdist.spec.paths import Path, elsewhere, near_name, show
from kdist.spec.violations import RULE, Violation


class SourceLocation(NamedTuple):
    """What a location of the model is in the file."""

    path: Path
    node: YamlNode | None  # None where the file has nothing at that path
    key: Mark  # the key of that node, or of the nearest section that is there

    @property
    def value(self) -> Mark:
        """Where the value stands: a scalar's own place, else its key's."""
        if self.node is not None and self.node.kind == "scalar" and self.node.text:
            return self.node.mark
        return self.key


def locate(tree: YamlNode, location: Sequence[str | int]) -> SourceLocation:
    """The place of a location of pydantic's, whose parts are names, list positions, and marks that
    the file does not have.

    Such marks (the branch of a union, `[key]`) are passed over, except that a last part that is a
    name is kept in the path: it is a field that is missing.
    """
    node, key, path = tree, tree.mark, list[str | int]()
    for index, part in enumerate(location):
        if isinstance(part, str) and part in node.entries:
            key, node = node.entries[part]
        elif isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            key = node.mark
        elif node.kind == "mapping" and isinstance(part, str) and part != "[key]":
            return SourceLocation((*path, *location[index:]), None, key)
        else:
            continue
        path.append(part)
    return SourceLocation(tuple(path), node, key)


_BYTES = re.compile(r"([0-9]+)\s*([kKmMgGtT])(i?)[bB]?\Z")
_NO_NAME = re.compile(r"[^a-z0-9]+")


class Sentence(NamedTuple):
    """What is wrong, what may have been meant, and how to repair it."""

    message: str
    suggestion: str = ""
    hint: str = ""


def about_missing(path: Path) -> Sentence:
    """A field that must be there."""
    field = reference.find(path)
    return Sentence("is required", hint=field.sentence if field else "")


def about_unknown(path: Path) -> Sentence:
    """A field that the model does not have: a near name beside it, the same name elsewhere, or the
    names there are.
    """
    section, name = reference.find(path[:-1]), str(path[-1])
    names = list(section.children) if section else []
    near = near_name(name, names)
    if near:
        return Sentence("unknown field", near)
    home = elsewhere(name)
    if home:
        return Sentence("unknown field", hint=f"it belongs to `{home.rsplit('.', 1)[0]}`: {home}")
    listed = ", ".join(names)
    return Sentence("unknown field", hint=f"known here: {listed}" if len(listed) <= 300 else "")


def about_value(error: ErrorDetails, place: SourceLocation, *, of_key: bool = False) -> Sentence:
    """A value that does not fit its field."""
    kind, context = error["type"], error.get("ctx", {})
    field = reference.find(place.path)
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
        return Sentence(f"{says}, found {_describe_found(node)}", _repaired(field, node.text))
    suggestion = (
        near_name(str(node.text), field.choices) if field.choices and node.kind == "scalar" else ""
    )
    return Sentence(
        f"must be {field.words}, found {_describe_found(node)}",
        suggestion,
        "" if suggestion else _hint(node, field),
    )


def _of_text(kind: str, context: dict[str, Any]) -> str:
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters"
    if kind == "string_too_short":
        return "must not be empty"
    return SAYS.get(str(context.get("pattern")), "has a form that is not allowed")


def _of_length(context: dict[str, Any]) -> str:
    """Pydantic's words for a list or mapping with too many or too few entries."""
    if "max_length" in context:
        return (
            f"must have at most {context['max_length']} entries, found "
            f"{context.get('actual_length') or 'more'}"
        )
    return (
        f"must have at least {context['min_length']} entries, found {context.get('actual_length')}"
    )


def _describe_found(node: YamlNode) -> str:
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


def _hint(node: YamlNode, field: reference.Field) -> str:
    """The way out, where what was written tells what was meant."""
    if node.kind != "scalar":
        return ""
    if isinstance(node.scalar, str):
        number = any(form.get("type") in ("integer", "number") for form in field.forms)
        return number_hint(node.text, plain=node.plain) if number else ""
    if node.scalar is None:
        return "give a value, or delete the line"
    if (
        isinstance(node.scalar, float)
        and node.scalar.is_integer()
        and not field.takes_text
        and abs(node.scalar) < 2**53
    ):
        return f"write {int(node.scalar)}"
    pattern = field.forms[0].get("pattern", "")
    if field.takes_text and not field.choices and re.match(pattern, node.text):
        taken = "boolean" if isinstance(node.scalar, bool) else "number"
        return f'without quotes YAML takes it for a {taken}; write "{node.text}"'
    return ""


def _repaired(field: reference.Field, text: str) -> str:
    """The name or quantity that a wrong one is close to; empty if there is none that the field
    takes.
    """
    pattern, longest = field.forms[0].get("pattern", ""), field.forms[0].get("maxLength", 0)
    size = _BYTES.match(text)
    plain = normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    tries = [
        f"{size[1]}{size[2].upper()}i" if size else "",
        _NO_NAME.sub("-", plain).strip("-"),
        re.sub(r"[^A-Za-z0-9]", "_", text),
    ]
    # references and paths are not guessed
    if "/" in text or re.match(pattern, "a/b") or not re.search("[A-Za-z0-9]", text):
        tries = tries[:1]
    return next(
        (
            each
            for each in tries
            if each and each != text and len(each) <= longest and re.match(pattern, each)
        ),
        "",
    )


_MAX_PROBLEMS = 100


class _Found(NamedTuple):
    """A problem, the path that is wrong, and the paths whose values it was judged by."""

    problem: Problem
    path: Path
    judged: tuple[Path, ...] = ()


def explain(tree: YamlNode, error: ValidationError) -> list[Problem]:
    """Every problem that the model has with a tree, given what it said at once."""
    values = tree.value()
    found = list(_found(tree, error.errors(include_url=False)))
    if isinstance(values.get("spec"), dict):
        found += _rules_behind(tree, values["spec"], found)
    return [each.problem for each in found[:_MAX_PROBLEMS]]


def _rules_behind(tree: YamlNode, spec: dict[str, Any], first: list[_Found]) -> list[_Found]:
    """The broken rules that pydantic does not reach while a field is wrong: ask again without what
    is wrong.

    A rule judged by something wrong is not told, as it may be a consequence only.
    """
    wrong = {path for each in first for path in _wrong(each)}
    told = {each.problem for each in first}
    revealed: list[_Found] = []
    remove = {each.path for each in first}
    while remove:
        wrong |= remove
        removed = [
            _remove(spec, path[1:]) for path in remove if path[:1] == ("spec",) and len(path) > 1
        ]
        if not any(removed):
            break
        try:
            Spec.model_validate(spec, by_alias=True, by_name=False)
            break
        except ValidationError as error:
            details = error.errors(include_url=False)
        remove = {
            ("spec", *(each["loc"][:-1] if each["type"] == "missing" else each["loc"]))
            for each in details
        }
        rules = [each for each in details if each["type"] in (RULE, "value_error")]
        broken = [
            each for each in _found(tree, rules, prefix=("spec",)) if each.problem not in told
        ]
        revealed += [each for each in broken if not any(_depends(each, path) for path in wrong)]
    return revealed


def _wrong(found: _Found) -> Iterator[Path]:
    """The path that is wrong; of an unknown field also the one that was meant."""
    yield found.path
    if found.problem.suggestion:
        yield (*found.path[:-1], found.problem.suggestion)


def _depends(found: _Found, wrong: Path) -> bool:
    return any(judged[: len(wrong)] == wrong for judged in found.judged)


def _remove(values: Any, path: Path) -> bool:
    """Take a path out of plain values; of a list the whole list, so that positions stay what they
    are.
    """
    for index, part in enumerate(path):
        if not isinstance(values, dict) or part not in values:
            return False
        if index == len(path) - 1 or isinstance(values[part], list):
            del values[part]
            return True
        values = values[part]
    return False


def _found(tree: YamlNode, details: Iterable[ErrorDetails], prefix: Path = ()) -> Iterator[_Found]:
    """One problem per complaint; the branches of a union, which all complain, become one."""
    seen: set[Path] = set()
    for each in details:
        location = (*prefix, *each["loc"])
        if each["type"] == RULE:
            yield from _violations(tree, location, each["ctx"]["violations"])
            continue
        place = locate(tree, location)
        if each["type"] == "value_error":
            sentence = Sentence(each["msg"].removeprefix("Value error, "))
            judged = _named(place.path, sentence.message)
            place = locate(tree, judged[0]) if len(judged) == 1 else place
            yield _Found(_problem(place.path, place.value, sentence), place.path, judged)
        elif each["type"] == "missing":
            yield _Found(_problem(place.path, place.key, about_missing(place.path)), place.path)
        elif each["type"] == "extra_forbidden":
            yield _Found(_problem(place.path, place.key, about_unknown(place.path)), place.path)
        elif "[key]" in location:
            yield _Found(
                _problem(place.path, place.key, about_value(each, place, of_key=True)), place.path
            )
        elif place.path not in seen:
            seen.add(place.path)
            yield _Found(_problem(place.path, place.value, about_value(each, place)), place.path)


def _named(path: Path, message: str) -> tuple[Path, ...]:
    """The fields of a section that a message names: those are what its rule looked at."""
    section = reference.find(path)
    return tuple(
        (*path, name)
        for name in (section.children if section else ())
        if re.search(rf"\b{name}\b", message)
    )


def _violations(tree: YamlNode, location: Path, violations: Iterable[Any]) -> Iterator[_Found]:
    for each in violations:
        violation = Violation(*each)
        judged = tuple((*location, *_parts(field)) for field in violation.judged)
        place = locate(tree, (*location, *_parts(violation.at)))
        sentence = Sentence(violation.message, violation.suggestion)
        yield _Found(_problem(place.path, place.value, sentence), place.path, judged)


def _parts(dotted: str) -> Path:
    return tuple(int(part) if part.isdigit() else part for part in dotted.split(".") if part)


def _problem(path: Path, mark: Mark, sentence: Sentence) -> Problem:
    return Problem(
        mark.source,
        mark.line,
        mark.column,
        show(path),
        sentence.message,
        sentence.suggestion,
        sentence.hint,
        width=mark.width,
    )
