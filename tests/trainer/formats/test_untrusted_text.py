"""The reader of JSON: plain values within bounds, or one error, whatever it is given."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from kdist_trainer.formats.untrusted_text import (
    MAX_DEPTH,
    MalformedTextError,
    parse_json,
    parse_model,
    parse_object,
)

documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)
# what JSON is made of, so that many texts are nearly right
rubbish = st.text(st.sampled_from(list('[]{}",:\\u/0123dDEFe+-.NaIfty \n\ud83d\ude00\x00x')))


class Model(BaseModel, strict=True):
    steps: tuple[int, ...]


def depth_of(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((depth_of(each) for each in items), default=0) if items != () else 0


@given(documents.filter(lambda found: depth_of(found) <= MAX_DEPTH))
def test_what_python_wrote_is_read_as_it_was(document: Any) -> None:
    for text in (json.dumps(document), json.dumps(document, ensure_ascii=False)):
        assert parse_json(text) == document
        assert parse_json(text.encode()) == document


@given(rubbish | st.binary() | st.text())
def test_any_text_is_read_or_is_malformed(text: str | bytes) -> None:
    try:
        found = parse_json(text)
    except MalformedTextError:
        return
    for value in leaves(found):
        if isinstance(value, int | float):
            assert math.isfinite(float(value))
        assert str(value).encode().decode() == str(value)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = value.values()
    elif not isinstance(value, list):
        yield value
        return
    for each in value:
        yield from leaves(each)


@given(st.lists(st.sampled_from(["[", "]", "{", "}", '"', "\\", "a", ",", ":"]), max_size=60))
def test_nothing_is_parsed_that_is_nested_deeper_than_allowed(pieces: list[str]) -> None:
    text = "".join(pieces)
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(MalformedTextError):
            parse_json(text, max_depth=3)
        return
    if depth_of(expected) <= 3:
        assert parse_json(text, max_depth=3) == expected
    else:
        with pytest.raises(MalformedTextError, match="deeper than 3"):
            parse_json(text, max_depth=3)


@pytest.mark.parametrize("limit", [1_000, 1_000_000])
@pytest.mark.parametrize(
    "text",
    [
        "[" * 5_000,
        '{"a":' * 500_000,
        '{"time":"x","event":"x","a":' + "[" * 5_000,
        "[" * 100_000 + "]" * 100_000,
        '["\\\\",' + "[" * 100_000,
    ],
    ids=lambda text: str(text)[:10] if isinstance(text, str) else "",
)
def test_depth_is_refused_before_anything_recurses(text: str, limit: int) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        with pytest.raises(MalformedTextError, match="nested deeper than 100 levels"):
            parse_json(text)
    finally:
        sys.setrecursionlimit(before)


def test_brackets_within_text_do_not_count_as_depth() -> None:
    text = json.dumps({"message": "[" * 5_000 + '\\"{' * 5_000})
    assert parse_json(text) == json.loads(text)


def test_a_parser_that_runs_out_of_stack_raises_the_same_error() -> None:
    depth = sys.getrecursionlimit() * 2
    with pytest.raises(MalformedTextError):
        parse_json("[" * depth + "]" * depth, max_depth=depth)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("NaN", "number NaN"),
        ('{"a": -Infinity}', "number -Infinity"),
        ("1e999", "beyond the range"),
        ("1" * 301, "301 digits"),
        ("1" * 5_000, "5000 digits"),
        (b"\xff", "not UTF-8"),
        ('"' + "x" * 100 + '"', "larger than 100 bytes"),
        ("🙂" * 30, "larger than 100 bytes"),
    ],
    ids=lambda part: str(part)[:12],
)
def test_a_malformed_text_says_what_is_wrong(text: str | bytes, reason: str) -> None:
    with pytest.raises(MalformedTextError, match=reason):
        parse_json(text, max_bytes=100 if "larger" in reason else 10_000)


def test_numbers_that_are_not_finite_are_read_where_the_caller_asks() -> None:
    found = parse_json("[NaN, Infinity, 1e999, 0.5]", allow_nan=True)
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, math.inf, 0.5]


def test_halves_of_surrogate_pairs_are_replaced_unless_they_are_asked_for() -> None:
    text = '["\\ud800", "\\udc80x", "\\ud83d\\ude00", "\\\\ud800", "\udc80"]'
    assert parse_json(text) == ["�", "�x", "😀", "\\ud800", "�"]
    assert parse_json(text, keep_surrogates=True) == json.loads(text)


def test_an_object_is_an_object() -> None:
    assert parse_object('{"a": 1}') == {"a": 1}
    with pytest.raises(MalformedTextError, match="not a JSON object"):
        parse_object("[]")


def test_a_model_is_validated_as_json() -> None:
    assert parse_model(Model, '{"steps": [1, 2]}').steps == (1, 2)
    with pytest.raises(ValidationError):
        parse_model(Model, '{"steps": ["1"]}')
    with pytest.raises(MalformedTextError):
        parse_model(Model, '{"steps": ' + "[" * 5_000)


@pytest.mark.parametrize("value", [None, 1, {}, [], {"a": 1}])
def test_what_is_no_text_is_refused_like_any_other_malformed_text(value: Any) -> None:
    with pytest.raises(MalformedTextError, match="is no text"):
        parse_json(value)
