"""The model's complaints about a tree, each with its place, in words a person can act on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kdist.errors import Problem
from kdist.load.places import locate
from kdist.load.sentences import Sentence, about_missing, about_unknown, about_value
from kdist.load.tree import Mark, Node
from kdist.spec import Spec, fields
from kdist.spec.paths import Path, show
from kdist.spec.rules import RULE, Violation

_MAX_PROBLEMS = 100


class _Found(NamedTuple):
    """A problem, the path that is wrong, and the paths whose values it was judged by."""

    problem: Problem
    path: Path
    judged: tuple[Path, ...] = ()


def explain(tree: Node, error: ValidationError) -> list[Problem]:
    """Every problem that the model has with a tree, given what it said at once."""
    values = tree.value()
    found = list(_found(tree, error.errors(include_url=False)))
    if isinstance(values.get("spec"), dict):
        found += _rules_behind(tree, values["spec"], found)
    return [each.problem for each in found[:_MAX_PROBLEMS]]


def _rules_behind(tree: Node, spec: dict[str, Any], first: list[_Found]) -> list[_Found]:
    """The broken rules that pydantic does not reach while a field is wrong: ask again without what is wrong.

    A rule judged by something wrong is not told, as it may be a consequence only.
    """
    wrong = {path for each in first for path in _wrong(each)}
    told = {each.problem for each in first}
    revealed: list[_Found] = []
    remove = {each.path for each in first}
    while remove:
        wrong |= remove
        removed = [_remove(spec, path[1:]) for path in remove if path[:1] == ("spec",) and len(path) > 1]
        if not any(removed):
            break
        try:
            Spec.model_validate(spec, by_alias=True, by_name=False)
            break
        except ValidationError as error:
            details = error.errors(include_url=False)
        remove = {("spec", *(each["loc"][:-1] if each["type"] == "missing" else each["loc"])) for each in details}
        rules = [each for each in details if each["type"] in (RULE, "value_error")]
        broken = [each for each in _found(tree, rules, prefix=("spec",)) if each.problem not in told]
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
    """Take a path out of plain values; of a list the whole list, so that positions stay what they are."""
    for index, part in enumerate(path):
        if not isinstance(values, dict) or part not in values:
            return False
        if index == len(path) - 1 or isinstance(values[part], list):
            del values[part]
            return True
        values = values[part]
    return False


def _found(tree: Node, details: Iterable[ErrorDetails], prefix: Path = ()) -> Iterator[_Found]:
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
            yield _Found(_problem(place.path, place.key, about_value(each, place, of_key=True)), place.path)
        elif place.path not in seen:
            seen.add(place.path)
            yield _Found(_problem(place.path, place.value, about_value(each, place)), place.path)


def _named(path: Path, message: str) -> tuple[Path, ...]:
    """The fields of a section that a message names: those are what its rule looked at."""
    section = fields.find(path)
    return tuple((*path, name) for name in (section.children if section else ()) if re.search(rf"\b{name}\b", message))


def _violations(tree: Node, location: Path, violations: Iterable[Any]) -> Iterator[_Found]:
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
        mark.source, mark.line, mark.column, show(path), sentence.message, sentence.suggestion, sentence.hint, width=mark.width
    )
