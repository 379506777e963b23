"""The job that a conversion collects: its values, and where in the input each comes from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

from kdist.convert.values import IN_POD, KEPT, LEFT_OUT, InputValue, ValueOutcome, settle
from kdist.errors import InvalidJobError
from kdist.job_file import load_text
from kdist.manifest import Manifest
from kdist.render import find_pod_problems
from kdist.render.text import to_yaml
from kdist.spec import job_document, reference
from kdist.spec.reference import Path, parse, show

POD: Final[Path] = ("spec", "podTemplate", "spec")
TRAINER: Final[Path] = (*POD, "containers", 0)
"""The training's container."""
_NOTHING: Final = {"spec": {"containers": [{"name": "trainer"}]}}


class JobDraft:
    """A job.yaml in the making. Fields of the spec are written with dots, other places as paths."""

    def __init__(self) -> None:
        pod = {"spec": {"containers": [{"name": "trainer"}]}}
        self.document: dict[str, Any] = job_document("train", podTemplate=pod)
        self.is_complete = True  # else it has a placeholder, or kdist does not take it
        self._origins: dict[Path, tuple[InputValue, ...]] = {}

    def add(self, field: str | Path, value: Any, *origins: InputValue) -> None:
        """Add an item to a list."""
        self.set((*_path(field), len(self.get(field) or ())), value, *origins)

    def set(self, field: str | Path, value: Any, *origins: InputValue) -> None:
        """Set a value. Where one is set already, or kdist does not take it, its origins are left
        out.
        """
        path = _path(field)
        refused = (each.outcomes.refused.get(each.path) for each in origins)
        if path in self._origins:
            lines = [f"line {each.mark.line}" for each in self._origins[path] if each.mark.line]
            by = next(iter(lines), "the command")
            settle(origins, ValueOutcome(LEFT_OUT, f"{show(path)} is already set by {by}"))
        elif why := next(filter(None, refused), ""):
            settle(origins, ValueOutcome(LEFT_OUT, f"kdist does not take it: {why}"))
        else:
            place: Any = self.document
            for part, after in pairwise(path):
                if isinstance(place, dict) and part not in place:
                    place[part] = [] if isinstance(after, int) else {}
                place = place[part]
            if isinstance(place, list):
                place.append(value)
            else:
                place[path[-1]] = value
            self._origins[path] = tuple(each for each in origins if each.node is not None)
            settle(origins, ValueOutcome(IN_POD if "podTemplate" in path else KEPT, show(path)))

    def get(self, field: str | Path) -> Any:
        """A value; None if it is not set."""
        place: Any = self.document
        for part in _path(field):
            try:
                place = place[part]
            except (KeyError, IndexError):
                return None
        return place

    def refuse(self, field: str, why: str) -> bool:
        """Note that kdist does not take the value of a field; whether it has an origin."""
        named = [path for path in self._origins if show(path) == field]
        path = named[0] if named else parse(field) or ()
        ends = range(len(path), 1, -1)
        owner = next((path[:end] for end in ends if path[:end] in self._origins), path)
        below = [each for key, each in self._origins.items() if key[: len(owner)] == owner]
        found = [each for origins in below for each in origins]
        for each in found if len(path) > 1 else ():
            each.outcomes.refused[each.path] = why
        return len(path) > 1 and bool(found)

    def write(self) -> str:
        """The text of the file. A comment names the line of the input that a value comes from."""
        spec = {name: self.get(name) for name in reference.root().children["spec"].children}
        is_given = {name: name in self.document["spec"] and spec[name] != _NOTHING for name in spec}
        lines = {}
        for path, origins in self._origins.items():
            while isinstance(value := self.get(path), dict | list) and value:
                path = (*path, 0 if isinstance(value, list) else next(iter(value)))
            if origins and origins[0].mark.line:
                lines[path] = f"line {origins[0].mark.line}"
        document = {**self.document, "spec": {name: spec[name] for name in spec if is_given[name]}}
        return to_yaml([Manifest(document, lines)], annotate=True) + "\n"


def _path(field: str | Path) -> Path:
    return ("spec", *field.split(".")) if isinstance(field, str) else field


def complete(build: Callable[[], JobDraft], about: InputValue) -> JobDraft:
    """The job that `build` makes, without the values that kdist's own rules refuse."""
    while True:
        about.outcomes.found.clear()
        about.outcomes.changes.clear()
        draft = build()
        try:
            job = load_text(draft.write(), source=about.mark.source)
            problems = [(show(path), why) for path, why, _ in find_pod_problems(job)]
        except InvalidJobError as error:
            problems = [(each.path, each.message) for each in error.problems]
        if not problems:
            return draft
        if not draft.refuse(*problems[0]):
            about.change(f"the job is not valid: {problems[0][0]}: {problems[0][1]}")
            draft.is_complete = False
            return draft
