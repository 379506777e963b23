"""The chart of a panel: its axes, lines, stacked areas and event markers."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tools.dashboards.chart import render_chart
from tools.dashboards.curve import Curve, EventMarker
from tools.dashboards.model import Panel, lines
from tools.dashboards.prometheus import Window

WINDOW = Window(1000.0, 1100.0, 1.0)
BLUE = ("#00f", "#88f")
NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def test_a_rare_peak_does_not_flatten_the_rest_and_is_named() -> None:
    values = [0.02 + 0.001 * (index % 5) for index in range(100)]
    values[3] = 30.0
    curve = Curve("p50", BLUE, tuple((1000.0 + index, value) for index, value in enumerate(values)))
    drawn = render_chart(panel_of("lines", minimum=0.0), [curve], [], WINDOW, width=400, height=200)
    assert "up to 30 s" not in drawn
    assert "up to 30" in drawn
    assert "0.02" in drawn
    whole = render_chart(panel_of("lines"), [curve], [], WINDOW, width=400, height=200)
    assert "up to" not in whole, "an axis that need not begin at 0 shows all of it"


def test_an_event_is_named_where_there_is_room() -> None:
    curve = Curve("a", BLUE, ((1000.0, 1.0), (1100.0, 2.0)))
    events = [
        EventMarker("New group", BLUE, 1050.0, True),
        EventMarker("Checkpoint", BLUE, 1060.0, False),
    ]
    wide = render_chart(panel_of("lines"), [curve], events, WINDOW, width=700, height=200)
    assert ">New group</text>" in wide
    assert ">Checkpoint</text>" not in wide
    assert ">New group</text>" not in render_chart(
        panel_of("lines"), [curve], events, WINDOW, width=400, height=200
    )


def panel_of(kind: str, **fields: Any) -> Panel:
    return lines("Loss", "What <it> says", "none", {"a": "x{}"}, stacked=kind == "stack", **fields)


@given(
    st.lists(st.lists(NUMBERS, max_size=12), max_size=4),
    st.sampled_from(["lines", "stack"]),
    st.booleans(),
    st.booleans(),
    st.none() | st.just(0.0),
)
def test_a_chart_is_well_formed_whatever_the_values_are(
    rows: list[list[float]], kind: str, logarithmic: bool, spans_gaps: bool, minimum: float | None
) -> None:
    curves = [
        Curve(
            f"<{index}&",
            BLUE,
            tuple((1000.0 + 7 * place, value) for place, value in enumerate(row)),
        )
        for index, row in enumerate(rows)
    ]
    panel = panel_of(kind, logarithmic=logarithmic, spans_gaps=spans_gaps, minimum=minimum)
    chart = render_chart(
        panel, curves, [EventMarker("a<b", BLUE, 1050.0, True)], WINDOW, width=400, height=200
    )
    tree = ElementTree.fromstring(chart)  # noqa: S314 - our own
    assert tree.tag == "svg"
    assert "nan" not in re.sub(r">[^<]*<", "><", chart)
    assert "inf" not in re.sub(r">[^<]*<|\"[^\"]*Loss[^\"]*\"", "", chart)


def test_a_gap_in_the_values_is_a_gap_in_the_line() -> None:
    points = (
        (1000.0, 1.0),
        (1001.0, 2.0),
        (1002.0, math.nan),
        (1003.0, 1.0),
        (1004.0, 2.0),
        (1050.0, 1.0),
        (1051.0, 2.0),
    )
    curve = Curve("a", BLUE, points)
    drawn = render_chart(panel_of("lines"), [curve, curve], [], WINDOW, width=400, height=200)
    assert drawn.count("<polyline") == 2 * 3
    joined = render_chart(
        panel_of("lines", spans_gaps=True), [curve], [], WINDOW, width=400, height=200
    )
    assert joined.count("<polyline") < 3
