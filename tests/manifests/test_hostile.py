"""Whatever stands in a job file arrives as the value it is: it adds no object and no field, and
changes nothing next to itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist import backends
from kdist.errors import InvalidJobError
from kdist.render import Placement, render
from kdist.spec import models
from kdist.spec.models import PATTERN_MESSAGES
from kdist_trainer.config.base import NO_NUL
from tests.manifests.jobs import FULL, load, place
from tests.manifests.test_fields import walk

Path = tuple[str | int, ...]

HOSTILE = [
    "}}{{ 7 * 7 }}",
    "{% for x in y %}",
    '"\n---\napiVersion: v1\nkind: Secret\nmetadata: {name: evil}\n',
    "a: b\n- c",
    '", "privileged": true, "x": "',
    "!from {source: x, value: y}",
    '!part "pod"',
    "&a *a !!python/object:os.system",
    "# no comment",
    "$(KDIST_POD)",
    "../../etc/passwd",
    "'; rm -rf /; '",
    "no",
    "012",
    "1:30",
    "~",
    "\u2028\u2029\x85\ufeff",
    "tab\t bell \x07 \x1b[31m",
    "😀 ünï 漢字",
]
PATTERNS = [pattern for pattern in PATTERN_MESSAGES if pattern not in (models._ONE_LINE, NO_NUL)]
TEXTS = (
    st.sampled_from(HOSTILE)
    | st.text(max_size=60)
    | st.one_of(*(st.from_regex(pattern) for pattern in PATTERNS))
)
LEAVES = [
    path
    for path, value in walk(FULL)
    if isinstance(value, str) and path[:2] != ("spec", "podTemplate")
]
BASE = {
    backend: [each.document for each in place(load(FULL), backend)] for backend in backends.NAMES
}


def put(path: Path, value: Any) -> dict[str, Any]:
    """The full job with this value there."""
    document: Any = copy.deepcopy(FULL)
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return dict(document)


def shape(value: Any) -> Iterator[tuple[Path, str]]:
    """Where there is something, and of which type; the names of variables and mounts are values and
    no shape.
    """
    for path, leaf in walk(value):
        yield path, type(leaf).__name__


def check_shape(found: list[dict[str, Any]], backend: str) -> None:
    assert [each["kind"] for each in found] == [each["kind"] for each in BASE[backend]]
    assert [sorted(shape(each), key=str) for each in found] == [
        sorted(shape(each), key=str) for each in BASE[backend]
    ]


@given(path=st.sampled_from(LEAVES), text=TEXTS, backend=st.sampled_from(backends.NAMES))
def test_a_hostile_value_is_refused_or_changes_only_values(
    path: Path, text: str, backend: str
) -> None:
    try:
        job = load(put(path, text))
    except InvalidJobError:
        return
    found = [each.document for each in place(job, backend)]
    check_shape(found, backend)


CODE = {**FULL["spec"]["data"][1], "url": "s3://team-data/code"}
del CODE["mountPath"]


SOURCES = {"url": CODE, "claim": {"claim": "team", "subPath": "src/mine"}}


def with_code(source: str, **changes: str) -> dict[str, Any]:
    return {**FULL, "spec": {**FULL["spec"], "code": {**SOURCES[source], **changes}}}


def shapes(source: str, backend: str, **changes: str) -> list[list[tuple[Path, str]]]:
    objects = place(load(with_code(source, **changes)), backend)
    return [sorted(shape(each.document), key=str) for each in objects]


CODE_SHAPES = {
    (source, backend): shapes(source, backend) for source in SOURCES for backend in backends.NAMES
}


@given(
    where=st.sampled_from([(source, name) for source, each in SOURCES.items() for name in each]),
    text=TEXTS,
    backend=st.sampled_from(backends.NAMES),
)
def test_a_hostile_source_of_code_is_refused_or_changes_only_values(
    where: tuple[str, str], text: str, backend: str
) -> None:
    source, name = where
    try:
        found = shapes(source, backend, **{name: text})
    except InvalidJobError:
        return
    assert found == CODE_SHAPES[source, backend]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("backend", backends.NAMES)
def test_free_text_arrives_unchanged_everywhere(text: str, backend: str) -> None:
    document = put(("spec", "env", 0, "value"), text)
    document["metadata"]["annotations"]["note"] = text
    document["spec"]["train"] |= {"workload": "team.model:Model", "options": {text: text}}
    document["spec"]["podTemplate"]["spec"]["containers"][0]["env"][0]["value"] = text
    objects = place(load(document), backend)
    check_shape([each.document for each in objects], backend)
    annotations = [each.document["metadata"]["annotations"]["note"] for each in objects]
    assert set(annotations) == {text}
    values = {
        value
        for each in objects
        if each.kind != "ConfigMap"
        for _, value in walk(each.document)
        if isinstance(value, str)
    }
    escaped = text.replace("$", "$$") if "$(" in text else text
    assert {text, escaped} <= values


CONTENT = st.binary(max_size=50) | st.text(max_size=50).map(str.encode)


@pytest.mark.sampled
@given(st.dictionaries(st.text(min_size=1, max_size=30), CONTENT, max_size=5))
def test_files_of_any_name_and_content_add_nothing_but_themselves(files: dict[str, bytes]) -> None:
    objects = render(load(FULL), Placement("job", "kubernetes", "c0ffee00", code=files))
    (packed,) = [each.document for each in objects if each.name.startswith("full-code-")]
    assert set(packed) <= {"apiVersion", "kind", "metadata", "immutable", "data", "binaryData"}
    assert len(packed.get("data", {})) + len(packed.get("binaryData", {})) == len(files)
    assert {} not in (packed.get("data"), packed.get("binaryData")), (
        "an empty one makes the next apply a change"
    )
    assert len(objects) == len(BASE["job"])
