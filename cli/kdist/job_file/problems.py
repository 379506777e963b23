"""Converts validation errors of the model to problems with a location in the file: what the field
expects, what was found, and the likely fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unicodedata import normalize

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kdist.errors import Problem
from kdist.job_file.yaml_parser import SPLIT, Mark, YamlNode, interval_hint, number_hint, shown
from kdist.spec import Spec, reference
from kdist.spec.models import PATTERN_MESSAGES, RULE, Violation
from kdist.spec.reference import Path, elsewhere, near_name, show
from kdist.spec.validators import OWN_KEYS


class SourceLocation(NamedTuple):
    """The part of the file that a location of the model refers to."""

    path: Path
    node: YamlNode | None  # None if the file has nothing at that path
    key: Mark  # the key of that node, or of the nearest section that exists

    @property
    def value(self) -> Mark:
        """Position of the value: of a scalar itself, else of its key."""
        if self.node is not None and self.node.kind == "scalar" and self.node.text:
            return self.node.mark
        return self.key


def locate(tree: YamlNode, location: Sequence[str | int]) -> SourceLocation:
    """Find a location of pydantic in the file. Its parts are names, list indices, and markers that
    the file does not contain.

    Markers (the branch of a union, `[key]`) are skipped; a trailing name stays in the path, because
    it is a missing field.
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


# kinds that `kdist convert` reads
CONVERTED = ("Job", "JobSet", "PyTorchJob", "StatefulSet", "TrainJob")
_BYTES = re.compile(r"([0-9]+)\s*([kKmMgGtT])(i?)[bB]?\Z")
_NO_NAME = re.compile(r"[^a-z0-9]+")


def at_path(tree: YamlNode, path: Sequence[str | int], message: str, hint: str) -> Problem:
    """A problem of the value at a path of the file."""
    return locate(tree, path).value.problem(message, path=show(path), hint=hint)


class Message(NamedTuple):
    """What is wrong, what was probably meant, and how to fix it."""

    message: str
    suggestion: str = ""
    hint: str = ""


# what other tools call a field -> the field
_SYNONYMS = {
    "workers": "nodes",
    "nproc_per_node": "procsPerNode",
    "gpu": "resources.gpu",
    "gpus": "resources.gpu",
    "cpu": "resources.cpu",
    "memory": "resources.memory",
    "pytorchReplicaSpecs": "nodes",
}
# fields of a pod that the job sets only through its template
_OF_PODS = ("affinity", "schedulerName", "topologySpreadConstraints", "volumes", "hostAliases")


def about_unknown(path: Path) -> Message:
    """For a field that the model does not have: suggest a similar name in the section, the same
    name in another section, or list the section's names.
    """
    section, name = reference.find(path[:-1]), str(path[-1])
    names = list(section.children) if section else []
    if path[:-1] == ("spec",) and name in _OF_PODS:
        return Message("unknown field", hint=f"write it as spec.podTemplate.spec.{name}")
    if path[:-1] == ("spec",) and name in _SYNONYMS:
        return Message("unknown field", hint=f"write it as spec.{_SYNONYMS[name]}")
    if hint := reference.REMOVED.get(reference.show(path)):
        return Message("no longer exists", hint=hint)
    near = near_name(name, names)
    if near:
        return Message("unknown field", near)
    other = elsewhere(name)
    if other:
        return Message("unknown field", hint=f"it belongs to `{other.rsplit('.', 1)[0]}`: {other}")
    listed = ", ".join(names)
    return Message("unknown field", hint=f"known here: {listed}" if len(listed) <= 300 else "")


def about_value(error: ErrorDetails, place: SourceLocation, *, of_key: bool = False) -> Message:
    """For a value that its field does not accept."""
    kind, context = error["type"], error.get("ctx", {})
    field = reference.find(place.path)
    node = place.node
    if of_key:
        return Message(f"as a key {_of_text(kind, context)}")
    if node is None or field is None:  # no field has such an error today
        return Message(f"does not fit: {error['msg']}")
    if node.kind == "scalar" and node.scalar is None and not node.text:
        return Message(
            f"is empty, must be {field.type_text}", hint="give a value, or delete the line"
        )
    if node.kind == "scalar" and {"steps", "seconds"} <= set(field.children):
        return Message(
            f"must be a mapping, found {_describe_found(node)}", hint=interval_hint(node.text)
        )
    if kind in ("too_long", "too_short"):
        return Message(_of_length(context))
    if kind in ("string_too_long", "string_too_short", "string_pattern_mismatch"):
        expected = f"must be {field.type_text}" if len(field.forms) > 1 else _of_text(kind, context)
        return Message(f"{expected}, found {_describe_found(node)}", _repaired(field, node.text))
    suggestion = (
        near_name(str(node.text), field.choices) if field.choices and node.kind == "scalar" else ""
    )
    return Message(
        f"must be {field.type_text}, found {_describe_found(node)}",
        suggestion,
        "" if suggestion else _hint(node, field),
    )


def _of_text(kind: str, context: dict[str, Any]) -> str:
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters"
    if kind == "string_too_short":
        return "must not be empty"
    return PATTERN_MESSAGES.get(str(context.get("pattern")), "has an invalid format")


def _of_length(context: dict[str, Any]) -> str:
    """For a list or mapping with too many or too few entries."""
    if "max_length" in context:
        return (
            f"must have at most {context['max_length']} entries, found "
            f"{context.get('actual_length') or 'more'}"
        )
    return (
        f"must have at least {context['min_length']} entries, found {context.get('actual_length')}"
    )


def _describe_found(node: YamlNode) -> str:
    """The value in the file, as a noun."""
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
    """How to fix the value, if the text shows what was meant."""
    if node.kind != "scalar":
        return ""
    if isinstance(node.scalar, str):
        number = any(form.get("type") in ("integer", "number") for form in field.forms)
        seconds = field.name.lower().endswith("seconds")
        return number_hint(node.text, plain=node.plain, seconds=seconds) if number else ""
    if node.scalar is None:
        return "give a value, or delete the line"
    if (
        isinstance(node.scalar, float)
        and node.scalar.is_integer()
        and not field.takes_text
        and abs(node.scalar) < 2**53
    ):
        return f"write {int(node.scalar)}"
    if field.takes_text and node.follows_comma:
        return SPLIT
    pattern = field.forms[0].get("pattern", "")
    if field.takes_text and not field.choices and re.match(pattern, node.text):
        taken = "boolean" if isinstance(node.scalar, bool) else "number"
        return f'without quotes YAML reads it as a {taken}; write "{node.text}"'
    return ""


def _repaired(field: reference.Field, text: str) -> str:
    """A valid name or quantity that is close to an invalid one; empty if there is none."""
    pattern, longest = field.forms[0].get("pattern", ""), field.forms[0].get("maxLength", 0)
    size = _BYTES.match(text)
    plain = normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    candidates = [
        f"{size[1]}{size[2].upper()}i" if size else "",
        _NO_NAME.sub("-", plain).strip("-"),
        re.sub(r"[^A-Za-z0-9]", "_", text),
    ]
    # references and paths are not guessed
    if "/" in text or re.match(pattern, "a/b") or not re.search("[A-Za-z0-9]", text):
        candidates = candidates[:1]
    return next(
        (
            each
            for each in candidates
            if each and each != text and len(each) <= longest and re.match(pattern, each)
        ),
        "",
    )


_MAX_PROBLEMS = 100


class _LocatedProblem(NamedTuple):
    """A problem, the path that is wrong, and the paths whose values its rule has read."""

    problem: Problem
    path: Path
    fields_read: tuple[Path, ...] = ()


def explain(tree: YamlNode, error: ValidationError) -> list[Problem]:
    """Every problem of a tree: those of `error`, and those of rules that pydantic did not check."""
    values = tree.value()
    found = list(_found(tree, error.errors(include_url=False)))
    if _is_other_kind(values):
        fix = "`kdist init` writes one"
        if values["kind"] in CONVERTED:
            file = "-" if tree.mark.source == "stdin" else tree.mark.source
            fix = f"`kdist convert {file}` makes one of this {values['kind']}"
        return [
            each.problem._replace(hint=f"kdist reads TrainingJobs; {fix}")
            for each in found
            if each.path in (("apiVersion",), ("kind",))
        ]
    if isinstance(values.get("spec"), dict):
        found += _rules_behind(tree, values["spec"], found)
    return [each.problem for each in found[:_MAX_PROBLEMS]]


def _is_other_kind(values: dict[str, Any]) -> bool:
    """Whether a file is a Kubernetes object of another kind, whose other fields say nothing."""
    version, kind = values.get("apiVersion"), values.get("kind")
    if not isinstance(version, str) or not isinstance(kind, str):
        return False
    return kind != "TrainingJob" and not version.startswith(OWN_KEYS)


def _rules_behind(
    tree: YamlNode, spec: dict[str, Any], first: list[_LocatedProblem]
) -> list[_LocatedProblem]:
    """The broken rules that pydantic does not check while a field is wrong: validate again without
    the wrong fields.

    A rule that reads a wrong field is not reported, because it may only be a consequence.
    """
    wrong = {each.path for each in first}
    # for an unknown field also the suggested one
    wrong |= {(*each.path[:-1], new) for each in first if (new := each.problem.suggestion)}
    reported = {each.problem for each in first}
    revealed: list[_LocatedProblem] = []
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
            each for each in _found(tree, rules, prefix=("spec",)) if each.problem not in reported
        ]
        revealed += [
            each
            for each in broken
            if not any(read[: len(path)] == path for read in each.fields_read for path in wrong)
        ]
    return revealed


def _remove(values: Any, path: Path) -> bool:
    """Remove a path from plain values; for a list item the whole list, so that indices hold."""
    for index, part in enumerate(path):
        if not isinstance(values, dict) or part not in values:
            return False
        if index == len(path) - 1 or isinstance(values[part], list):
            del values[part]
            return True
        values = values[part]
    return False


def _found(
    tree: YamlNode, details: Iterable[ErrorDetails], prefix: Path = ()
) -> Iterator[_LocatedProblem]:
    """One problem per error; the errors of all branches of a union become one."""
    seen: set[Path] = set()
    for each in details:
        location = (*prefix, *each["loc"])
        if each["type"] == RULE:
            yield from _violations(tree, location, each["ctx"]["violations"])
            continue
        place, fields_read = locate(tree, location), tuple[Path, ...]()
        mark = place.key
        if each["type"] == "value_error":
            message = Message(each["msg"].removeprefix("Value error, "))
            # the fields of a section that a message names, which are those that its rule has read
            section = reference.find(place.path)
            fields_read = tuple(
                (*place.path, name)
                for name in (section.children if section else ())
                if re.search(rf"\b{name}\b", message.message)
            )
            place = locate(tree, fields_read[0]) if len(fields_read) == 1 else place
            mark = place.value
        elif each["type"] == "missing":
            field = reference.find(place.path)
            message = Message("is required", hint=field.description if field else "")
        elif each["type"] == "extra_forbidden":
            message = about_unknown(place.path)
        elif "[key]" in location:
            message = about_value(each, place, of_key=True)
        elif place.path not in seen:
            seen.add(place.path)
            mark, message = place.value, about_value(each, place)
        else:
            continue
        yield _LocatedProblem(_problem(place.path, mark, message), place.path, fields_read)


def _violations(
    tree: YamlNode, location: Path, violations: Iterable[Any]
) -> Iterator[_LocatedProblem]:
    for each in violations:
        violation = Violation(*each)
        fields_read = tuple((*location, *_parts(field)) for field in violation.fields_read)
        place = locate(tree, (*location, *_parts(violation.at)))
        message = Message(violation.message, violation.suggestion)
        yield _LocatedProblem(_problem(place.path, place.value, message), place.path, fields_read)


def _parts(dotted: str) -> Path:
    return tuple(int(part) if part.isdigit() else part for part in dotted.split(".") if part)


def _problem(path: Path, mark: Mark, message: Message) -> Problem:
    text, suggestion, hint = message
    return mark.problem(text, path=show(path), suggestion=suggestion, hint=hint)
