"""Plain scalars are YAML 1.2's, whatever YAML 1.1 made of them."""

from __future__ import annotations

import pytest

from kdist.job_file.yaml_parser import number_hint, resolve


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "No",
        "yes",
        "on",
        "OFF",
        "y",
        "n",
        "TrUe",
        "1:30",
        "1_000",
        "2026-01-01",
        "0b11",
        "1,5",
    ],
)
def test_what_yaml_1_1_took_for_something_else_is_text(text: str) -> None:
    assert resolve(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "0x",
        "0o8",
        "1e",
        ".",
        "-",
        "+",
        "1.2.3",
        "1 2",
        "٣",
        "¹",
        "1e5e5",
        "--1",
        "0x_f",
        "=",
        "nan",
        "inf",
    ],
)
def test_what_only_looks_like_a_number_is_text(text: str) -> None:
    assert resolve(text) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("012", 12),
        ("-3", -3),
        ("+3", 3),
        ("0o17", 15),
        ("0xFf", 255),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5E-3", -0.0015),
        ("true", True),
        ("FALSE", False),
        ("", None),
        ("~", None),
        ("Null", None),
    ],
)
def test_numbers_booleans_and_nothing_are_those_of_the_core_schema(
    text: str, value: object
) -> None:
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)


@pytest.mark.parametrize(
    "text", [".inf", "-.INF", "+.Inf", ".nan", ".NaN", "1e999", "-1e400", "9" * 65]
)
def test_a_number_that_no_job_can_hold_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number"):
        resolve(text)


@pytest.mark.parametrize(
    ("text", "ends_with"),
    [
        ("1:30", "write 90"),
        ("1:00:01", "write 3601"),
        ("1_000", "write 1000"),
        ("5m", "write 300"),
        ("2 hours", "write 7200"),
        ("90s", "write 90"),
        ("1d", "write 86400"),
    ],
)
def test_a_hint_says_the_number_that_was_meant(text: str, ends_with: str) -> None:
    assert number_hint(text, plain=True).endswith(ends_with)


def test_a_quoted_number_is_reported_to_lose_its_quotes() -> None:
    assert number_hint("3", plain=False) == "quotes make it text; write 3 without them"
    assert number_hint("three", plain=False) == ""
    assert number_hint(".inf", plain=False) == ""
    assert number_hint("true", plain=False) == ""


@pytest.mark.parametrize("text", [":".join(["59"] * 3000), "1_0" * 3000, "9" * 5000 + "m"])
def test_a_number_that_is_too_long_for_any_field_gets_no_hint(text: str) -> None:
    assert number_hint(text, plain=True) == ""
