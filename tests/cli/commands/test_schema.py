"""The published JSON Schema is the model's, closed and described."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdist.spec import reference
from tests.cli.conftest import Kdist


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


def test_it_is_printed_and_written_alike(kdist: Kdist, tmp_path: Path) -> None:
    printed = kdist("schema")
    written = kdist("schema", "--out", str(tmp_path / "schema.json"))
    assert (printed.exit_code, written.exit_code, written.stdout) == (0, 0, "")
    assert (tmp_path / "schema.json").read_text() == printed.stdout
    assert json.loads(printed.stdout)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_a_place_that_cannot_be_written_is_an_error(kdist: Kdist, tmp_path: Path) -> None:
    assert kdist("schema", "--out", str(tmp_path / "no" / "schema.json")).exit_code == 2


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
