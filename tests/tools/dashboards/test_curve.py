"""Curves: gaps, limits, and stacks."""

from __future__ import annotations

import math

from tools.dashboards.curve import Curve, split_at_gaps, stack

BLUE = ("#00f", "#88f")


def test_curves_of_a_stack_add_up() -> None:
    low = Curve("a", BLUE, ((1.0, 2.0), (2.0, 3.0)))
    high = Curve("b", BLUE, ((1.0, 1.0), (3.0, 5.0)))
    stacked = stack([low, high])
    assert stacked[0].points == ((1.0, 2.0), (2.0, 3.0), (3.0, 0.0))
    assert stacked[1].points == ((1.0, 3.0), (2.0, 3.0), (3.0, 5.0))


def test_a_curve_is_split_where_a_value_is_missing_or_the_next_one_is_late() -> None:
    points = [(1.0, 1.0), (2.0, math.nan), (3.0, 1.0), (4.0, 2.0), (9.0, 1.0)]
    assert split_at_gaps(points, 3.0) == [[(1.0, 1.0)], [(3.0, 1.0), (4.0, 2.0)], [(9.0, 1.0)]]
