"""What is written as JSON is JSON, whatever numbers it holds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from kdist_trainer.checkpoint.manifest import decode, encode
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json

VALUES: list[Any] = [
    {"a": [1, 2.5, None, True, "ü"], "b": {"c": (1, 2)}},
    {"loss": math.nan, "list": [math.inf, -math.inf, 1.0]},
]


def test_what_python_can_write_as_json_is_the_same() -> None:
    for options in ({}, {"indent": 2}, {"ensure_ascii": False}, {"sort_keys": True}):
        assert encode_json(VALUES[0], **options) == json.dumps(VALUES[0], **options)


def test_numbers_that_json_has_not_are_named() -> None:
    read = parse_json(encode_json(VALUES[1]))
    assert read == {"loss": "nan", "list": ["inf", "-inf", 1.0]}


def test_what_cannot_be_written_raises() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (loop, {"a": object()}):
        with pytest.raises((TypeError, ValueError)):
            encode_json(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_the_state_of_a_training_gets_such_numbers_back(number: float) -> None:
    encoded, extended = encode({"best": number, "$float": "mine"}, "state")
    assert extended
    found = decode(parse_json(encode_json(encoded)))
    assert repr(found["best"]) == repr(number)
    assert found["$float"] == "mine"
