"""What a soak says of its rows: slopes with their bounds, levels, early next to late."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from bench.soak.trend import summarize, theil_sen


def test_a_slope_is_not_moved_by_points_that_lie_anywhere() -> None:
    points = [(float(x), 3.0 * x + 7) for x in range(20)]
    points[3], points[11] = (3.0, 900.0), (11.0, -500.0)
    middle, upper = theil_sen(points)
    assert middle == pytest.approx(3.0)
    assert 3.0 <= upper < 60


def test_the_upper_bound_holds_the_true_slope_in_most_of_many_draws() -> None:
    draw = random.Random(3)
    held = 0
    for _ in range(200):
        upper = theil_sen([(float(x), 0.5 * x + draw.gauss(0, 4)) for x in range(25)])[1]
        held += upper >= 0.5
    assert 188 <= held <= 200, "97.5 % lie below the upper end of a two-sided 95 %"


def test_of_too_few_points_nothing_is_bounded() -> None:
    assert theil_sen([]) == (0.0, math.inf)
    assert theil_sen([(1.0, 5.0)]) == (0.0, math.inf)
    assert theil_sen([(1.0, 5.0), (2.0, 6.0)])[1] == math.inf


def row(number: int, pid: int) -> dict[str, Any]:
    held = {"pid": pid, "descriptors": 30 + number, "threads": 9, "privateKib": 100_000 + number}
    return {
        "seconds": 60.0,
        "accidents": 6,
        "recoveries": [0.2 if number < 5 else 0.9] * 6,
        "stepsPerSecond": 50.0 - number,
        "commits": number,
        "files": 10,
        "bytes": 1000 * number,
        "series": None,
        "cores": {"gloo_tcp_loop": 0.02 * number, "idle": 0.001},
        "processes": {"rank node-0/0": held},
    }


def test_it_says_what_grows_what_is_level_and_what_slows_down() -> None:
    lines = dict(summarize([row(number, 7 if number else 3) for number in range(11)]))
    assert lines["seconds, accidents, recoveries"] == "660, 66, 66"
    assert lines["steps/s early, late"] == "48.0, 42.0 (88%)"
    assert lines["recoveries' p95 early, late"] == "0.20 s, 0.90 s"
    assert lines["commits"] == "10"
    assert lines["files first, last, most"] == "10, 10, 10"
    assert "series first, last, most" not in lines
    assert lines["rank node-0/0, 10 rows"] == (
        "97 MiB, +1 (≤ +1) KiB/min; descriptors 31, 40, 40; threads 9, 9, 9"
    ), "of the process that lived longest"
    assert lines["cores of gloo_tcp_loop early, late"] == "0.04, 0.16"
    assert "cores of idle early, late" not in lines
