"""`kdist explain` knows every field of job.yaml."""

from __future__ import annotations

import json

import pytest

from kdist.spec import reference
from tests.cli.conftest import Kdist

FIELDS = list(reference.root().walk())


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.path)
def test_every_field_is_explained(field: reference.Field, kdist: Kdist) -> None:
    result = kdist("explain", field.path)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"FIELD:    {field.path}\nTYPE:     ")
    assert field.description.rsplit(" ", 1)[-1] in result.stdout


def test_a_section_shows_its_type_default_sentence_and_fields(kdist: Kdist) -> None:
    assert kdist("explain", "spec.train.checkpoint").stdout == (
        "FIELD:    spec.train.checkpoint\n"
        "TYPE:     {every, mode, keep, load}\n"
        'DEFAULT:  {"mode": "async", "keep": 3, "load": "each"}\n'
        "\n"
        "When and how checkpoints are saved.\n"
        "\n"
        "FIELDS:\n"
        '  every  <mapping> default {"auto": true}\n'
        "         Interval between checkpoints: {auto: true}, or auto for short, the one that "
        "loses the least\n"
        "         training time; in seconds; in steps; or steps with one of the others.\n"
        '  mode   <async or blocking> default "async"\n'
        "         async writes in the background; blocking pauses training for the write.\n"
        "  keep   <int or mapping> default 3\n"
        "         Committed checkpoints to keep: the number of the last ones, or "
        "{last, best, every}.\n"
        '  load   <each or broadcast> default "each"\n'
        "         each: every rank reads its own part; broadcast: rank 0 reads and sends it to the "
        "others.\n"
    )


@pytest.mark.parametrize("path", ["spec.env[].name", "spec.env[0].name", "spec.env.name"])
def test_the_items_of_a_list_are_named_in_any_way(path: str, kdist: Kdist) -> None:
    assert kdist("explain", path).stdout.startswith("FIELD:    spec.env[].name\n")


def test_without_a_field_the_whole_file_is_explained(kdist: Kdist) -> None:
    assert [
        line.split()[0]
        for line in kdist("explain").stdout.splitlines()
        if line.startswith("  ") and "<" in line
    ] == [
        "apiVersion",
        "kind",
        "metadata",
        "spec",
    ]


def test_recursive_shows_every_field_and_its_sentence(kdist: Kdist) -> None:
    lines = kdist("explain", "-r").stdout.splitlines()
    assert {line.split()[0] for line in lines if "  <" in line} == {field.path for field in FIELDS}


def test_json_is_for_programs(kdist: Kdist) -> None:
    answer = json.loads(kdist("explain", "spec.train.precision", "-o", "json").stdout)
    assert answer["default"] == "fp32"
    assert answer["choices"][0] == "fp32"
    assert "bf16" in answer["choices"]
    whole = json.loads(kdist("explain", "-r", "-o", "json").stdout)
    expected = ["apiVersion", "kind", "metadata", "spec"]
    assert [field["path"] for field in whole["fields"]] == expected


def test_the_json_schema_is_that_of_the_whole_file(kdist: Kdist) -> None:
    printed = kdist("explain", "-o", "jsonschema")
    assert (printed.exit_code, printed.stdout) == (0, reference.schema_text())
    assert json.loads(printed.stdout)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert kdist("explain", "spec", "-o", "jsonschema").exit_code == 2


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("spec.trian.epochs", "spec.train.epochs"),
        ("spec.epochs", "spec.train.epochs"),
        ("spec.env[].valeu", "spec.env[].value"),
        ("sepc", "spec"),
        ("spec.train.checkpoint.evry.steps", "spec.train.checkpoint.every.steps"),
    ],
)
def test_a_wrong_field_gets_the_one_that_was_meant(wrong: str, right: str, kdist: Kdist) -> None:
    result = kdist("explain", wrong)
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr == (
        f"Error: job.yaml has no field `{wrong}`\nHint: did you mean `{right}`?\nNext: "
        f"kdist explain {right}\n"
    )


@pytest.mark.parametrize("wrong", ["bananas", "spec.nodes.max.more", "[", "spec.", "a b"])
def test_a_field_like_no_other_gets_the_list(wrong: str, kdist: Kdist) -> None:
    result = kdist("explain", wrong)
    assert result.exit_code in (0, 4)
    assert result.exit_code == 0 or result.stderr.endswith("Next: kdist explain -r\n")
