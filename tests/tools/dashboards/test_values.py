"""Values as text in Grafana's units, and the ticks of an axis."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tools.dashboards.values import format_value, linear_axis, logarithmic_axis

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)
UNITS = ["none", "s", "percentunit", "bytes", "Bps", "cps", "flops"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0000123, "s", "12 µs"),
        (0.0123, "s", "12.3 ms"),
        (3.21, "s", "3.2 s"),
        (754, "s", "12 min 34 s"),
        (7510, "s", "2 h 05 min"),
        (0.934, "percentunit", "93.4 %"),
        (1_900_000, "bytes", "1.8 MiB"),
        (2.5e9, "Bps", "2.5 GB/s"),
        (12, "cps", "12 /s"),
        (3.4e11, "flops", "340 GFLOP/s"),
        (3700, "cps", "3.7 k/s"),
        (2400, "none", "2,400"),
        (0.00618, "none", "0.00618"),
        (12_345_678, "none", "12.3M"),
        (math.nan, "s", "NaN"),
        (math.inf, "none", "∞"),
    ],
)
def test_a_number_is_shown_with_its_unit(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


@given(NUMBERS, st.sampled_from(UNITS), st.none() | st.integers(0, 4))
def test_every_number_has_a_short_text(value: float, unit: str, decimals: int | None) -> None:
    text = format_value(value, unit, decimals=decimals)
    assert text
    assert len(text) < 70


@pytest.mark.parametrize(
    ("high", "unit", "texts"),
    [
        (1.0, "cps", ["0 /s", "0.25 /s", "0.50 /s", "0.75 /s", "1.00 /s"]),
        (0.000042, "none", ["0", "2e-5", "4e-5"]),
        (544_210_944, "bytes", ["0 MiB", "200 MiB", "400 MiB"]),
        (1_992_294, "bytes", ["0 MiB", "0.5 MiB", "1.0 MiB", "1.5 MiB"]),
        (4.75e10, "flops", ["0 GFLOP/s", "20 GFLOP/s", "40 GFLOP/s"]),
        (0.03, "percentunit", ["0 %", "1 %", "2 %", "3 %"]),
        (150_000, "none", ["0k", "50k", "100k", "150k"]),
        (7200, "none", ["0", "2,000", "4,000", "6,000"]),
    ],
)
def test_an_axis_has_one_unit_and_digits_that_tell_its_numbers_apart(
    high: float, unit: str, texts: list[str]
) -> None:
    assert [text for _, text in linear_axis(0.0, high, unit, most=4)] == texts


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-9, 1e12),
    st.sampled_from([unit for unit in UNITS if unit != "s"]),
)
@example(5.96e-08, 1e-09, "none")
def test_no_two_ticks_of_an_axis_have_the_same_text(low: float, way: float, unit: str) -> None:
    found = linear_axis(low, low + way, unit, most=4)
    if way > abs(low) * 0.01:
        assert len({text for _, text in found}) == len(found)


def test_a_logarithmic_axis_has_round_numbers() -> None:
    assert [text for _, text in logarithmic_axis(0.1, 10.0, "none")] == ["0.1", "1", "10"]
    assert [text for _, text in logarithmic_axis(1.0, 10.0, "none")] == ["1", "2", "5", "10"]
