"""Ticks, scales, and the plot area of a chart."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.report.chart import Plot, Scale, decade_ticks, round_ticks, time_ticks


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9))
def test_round_ticks_are_few_and_inside(low: float, length: float) -> None:
    found = round_ticks(low, low + length)
    assert len(found) <= 6
    assert all(low - length * 1e-3 <= tick <= low + length * 1.001 for tick in found)


@pytest.mark.parametrize("high", [0.0, math.inf, math.nan, -1.0])
def test_a_range_without_a_length_has_one_tick(high: float) -> None:
    assert round_ticks(0.0, high) == [0.0]


@given(st.floats(1e-300, 1e300), st.floats(1.0, 1e30), st.integers(2, 9))
def test_decade_ticks_are_few_and_inside(low: float, ratio: float, most: int) -> None:
    high = min(low * ratio, 1e308)
    found = decade_ticks(low, high, most=most)
    assert len(found) <= most + 1
    assert all(low <= tick <= high for tick in found)


def test_decade_ticks_divide_a_decade_where_there_is_room() -> None:
    assert decade_ticks(0.1, 1.0) == [0.1, 0.2, 0.5, 1.0]
    assert decade_ticks(0.1, 10.0) == [0.1, 1.0, 10.0]
    assert decade_ticks(1.0, 1e8, most=4) == [1.0, 1e2, 1e4, 1e6, 1e8]


@given(st.integers(0, 10**10), st.integers(0, 10**10), st.integers(2, 9))
def test_time_ticks_are_few_and_inside(start: int, length: int, most: int) -> None:
    found = time_ticks(start, start + length, most=most)
    assert len(found) <= most + 1
    assert all(start <= tick <= start + length for tick in found)


def test_time_ticks_are_round_times() -> None:
    assert time_ticks(0.0, 100.0, most=8) == [0.0, 15.0, 30.0, 45.0, 60.0, 75.0, 90.0]
    assert time_ticks(7000.0, 15000.0, most=3) == [7200.0, 10800.0, 14400.0]
    assert time_ticks(0.0, 86400.0 * 20, most=4) == [86400.0 * days for days in (0, 5, 10, 15, 20)]
    assert time_ticks(0.0, math.inf, most=4) == [0.0]
    assert len(time_ticks(0.0, 1e300, most=4)) <= 5


def test_a_scale_maps_values_to_pixels() -> None:
    assert [Scale((0.0, 10.0), (100, 200))(value) for value in (0.0, 5.0, 10.0)] == [100, 150, 200]
    falling = Scale((0.01, 1.0), (90, 10), logarithmic=True)
    assert [falling(value) for value in (0.0, 0.01, 0.1, 1.0)] == pytest.approx([90, 90, 50, 10])
    assert falling(5.0) == 10
    assert Scale((3.0, 3.0), (0, 10))(3.0) == 0


def test_a_plot_draws_axes_and_lines_within_its_margins() -> None:
    plot = Plot(200, 100, x=(0.0, 1.0), y=(0.0, 2.0), left=50)
    assert plot.line([(0.0, 0.0), (1.0, 2.0)], id="a") == (
        '<polyline class="line" id="a" points="50.0,80.0 190.0,8.0"></polyline>'
    )
    chart = plot.render("<loss>", plot.y_axis([(0.0, "low")]), plot.x_axis([(1.0, "end")]))
    assert chart.startswith('<svg viewBox="0 0 200 100" role="img" aria-label="&lt;loss&gt;">')
    assert '<line class="rule" x1="50" x2="190" y1="80.0" y2="80.0">' in chart
    assert ">low</text>" in chart
    assert ">end</text>" in chart
