"""The published JSON Schema is the model's, closed and described."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kdist.spec import reference


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Every schema of a mapping with named fields."""
    if isinstance(node, dict):
        if "properties" in node:
            yield node
        for each in node.values():
            yield from objects(each)
    elif isinstance(node, list):
        for each in node:
            yield from objects(each)


def test_every_mapping_is_closed_and_every_field_described() -> None:
    found = list(objects(reference.schema()))
    assert len(found) > 10
    for each in found:
        assert each["additionalProperties"] is False
        assert all("description" in field for field in each["properties"].values())


def test_no_python_name_and_no_generated_title_is_left() -> None:
    text = json.dumps({key: value for key, value in reference.schema().items() if key != "title"})
    assert '"title"' not in text
    assert '"max_restarts"' not in text
