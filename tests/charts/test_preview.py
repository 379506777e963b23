"""The page that draws dashboards without a Grafana: its figures, its curves, and what it makes of
odd answers.
"""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.dashboards import DASHBOARDS
from kdist.dashboards.model import STATUS, Kind, Panel, bars, lines, stat
from kdist.dashboards.preview import panel as card
from kdist.dashboards.preview import svg
from kdist.dashboards.preview.curve import Curve, EventMarker
from kdist.dashboards.prometheus import Series, Window, fill

WINDOW = Window(1000.0, 1100.0, 1.0)
BLUE = ("#00f", "#88f")
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
def test_a_number_is_shown_as_people_say_it(value: float, unit: str, text: str) -> None:
    assert svg.show(value, unit) == text


@given(NUMBERS, st.sampled_from(UNITS), st.none() | st.integers(0, 4))
def test_every_number_has_a_short_text(value: float, unit: str, decimals: int | None) -> None:
    text = svg.show(value, unit, decimals=decimals)
    assert text
    assert len(text) < 70


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9))
def test_ticks_are_few_and_inside(low: float, way: float) -> None:
    found = svg.ticks(low, low + way)
    assert len(found) <= 6
    assert all(low - way * 1e-3 <= tick <= low + way * 1.001 for tick in found)


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
    assert [text for _, text in svg.axis(0.0, high, unit, most=4)] == texts


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-9, 1e12),
    st.sampled_from([unit for unit in UNITS if unit != "s"]),
)
def test_an_axis_never_says_two_things_alike(low: float, way: float, unit: str) -> None:
    found = svg.axis(low, low + way, unit, most=4)
    if way > abs(low) * 0.01:
        assert len({text for _, text in found}) == len(found)


def test_a_rare_peak_does_not_flatten_all_the_rest_and_is_named() -> None:
    values = [0.02 + 0.001 * (index % 5) for index in range(100)]
    values[3] = 30.0
    curve = Curve("p50", BLUE, tuple((1000.0 + index, value) for index, value in enumerate(values)))
    drawn = svg.render_chart(
        panel_of("lines", minimum=0.0), [curve], [], WINDOW, width=400, height=200
    )
    assert "up to 30 s" not in drawn
    assert "up to 30" in drawn
    assert "0.02" in drawn
    whole = svg.render_chart(panel_of("lines"), [curve], [], WINDOW, width=400, height=200)
    assert "up to" not in whole, "an axis that need not begin at 0 shows all of it"


def test_a_legend_shows_what_fits_and_counts_the_rest() -> None:
    def drawn(number: int) -> str:
        answer = [
            Series({"rank": f"{rank}"}, ((1000.0, 1.0), (1001.0, 2.0))) for rank in range(number)
        ]
        return card.render_panel(
            lines("l", "d", "none", {"rank {{rank}}": "x{}"}, width=6),
            card.PanelSource(lambda _: answer, lambda _: answer, WINDOW),
            [],
        )

    assert drawn(4).count("<span><i") == 4
    assert " more<" not in drawn(4)
    many = drawn(64)
    shown = many.count("<span><i")
    assert 4 < shown < 20
    assert f"<span>{64 - shown} more</span>" in many


def test_what_happened_is_named_where_there_is_room() -> None:
    curve = Curve("a", BLUE, ((1000.0, 1.0), (1100.0, 2.0)))
    events = [
        EventMarker("New group", BLUE, 1050.0, True),
        EventMarker("Checkpoint", BLUE, 1060.0, False),
    ]
    wide = svg.render_chart(panel_of("lines"), [curve], events, WINDOW, width=700, height=200)
    assert ">New group</text>" in wide
    assert ">Checkpoint</text>" not in wide
    assert ">New group</text>" not in svg.render_chart(
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
def test_whatever_the_numbers_are_the_picture_is_well_formed(
    rows: list[list[float]], kind: str, logarithmic: bool, bridged: bool, minimum: float | None
) -> None:
    curves = [
        Curve(
            f"<{index}&",
            BLUE,
            tuple((1000.0 + 7 * place, value) for place, value in enumerate(row)),
        )
        for index, row in enumerate(rows)
    ]
    panel = panel_of(kind, logarithmic=logarithmic, bridged=bridged, minimum=minimum)
    picture = svg.render_chart(
        panel, curves, [EventMarker("a<b", BLUE, 1050.0, True)], WINDOW, width=400, height=200
    )
    tree = ElementTree.fromstring(picture)  # noqa: S314 - our own
    assert tree.tag == "svg"
    assert "nan" not in re.sub(r">[^<]*<", "><", picture)
    assert "inf" not in re.sub(r">[^<]*<|\"[^\"]*Loss[^\"]*\"", "", picture)


def test_a_gap_in_the_numbers_is_a_gap_in_the_line() -> None:
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
    drawn = svg.render_chart(panel_of("lines"), [curve, curve], [], WINDOW, width=400, height=200)
    assert drawn.count("<polyline") == 2 * 3
    joined = svg.render_chart(
        panel_of("lines", bridged=True), [curve], [], WINDOW, width=400, height=200
    )
    assert joined.count("<polyline") < 3


def test_layers_of_a_stack_stand_on_each_other() -> None:
    low = Curve("a", BLUE, ((1.0, 2.0), (2.0, 3.0)))
    high = Curve("b", BLUE, ((1.0, 1.0), (3.0, 5.0)))
    piled = svg.pile([low, high])
    assert piled[0].points == ((1.0, 2.0), (2.0, 3.0), (3.0, 0.0))
    assert piled[1].points == ((1.0, 3.0), (2.0, 3.0), (3.0, 5.0))


def test_names_from_labels_cannot_add_to_the_page() -> None:
    evil = {"rank": "<script>alert(1)</script>", "namespace": "&", "kdist_job": "<b>"}
    answer = [Series(evil, ((1000.0, 1.0), (1001.0, 2.0), (1002.0, 3.0)))]
    source = card.PanelSource(lambda _: answer, lambda _: answer, WINDOW)
    table = Panel(title="t", description="d", kind=Kind.TABLE, queries={"a": "x{}"}, unit="none")
    shown = [
        lines("l", "d", "none", {"rank {{rank}}": "x{}"}),
        bars("b", "d", "none", {"{{rank}}": "x{}"}),
        table,
    ]
    for panel in [*shown, stat("s", "d", "x{}", "none")]:
        html = card.render_panel(panel, source, [])
        assert "<script" not in html
        assert "<b><b>" not in html


def test_the_table_of_trainings_names_their_state_and_colours_what_is_bad() -> None:
    (table,) = [panel for panel in DASHBOARDS["fleet"].panels if panel.kind is Kind.TABLE]
    job = {"namespace": "ml", "kdist_job": "digits"}
    answers = {
        table.queries["State"]: [
            Series({**job, "state": word}, ((1000.0, 1.0),)) for word in ("running", "hung")
        ],
        table.queries["Skew"]: [Series(job, ((1000.0, 1.5),))],
    }
    html = card.render_panel(
        table, card.PanelSource(lambda _: [], lambda query: answers.get(query, []), WINDOW), []
    )
    assert "<td>hung, running</td>" in html
    assert f'color:{svg.paint(STATUS["bad"])}">1.5</span>' in html
    assert html.count("<td>-</td>") == len(table.queries) - 2


def test_a_panel_without_an_answer_says_so() -> None:
    source = card.PanelSource(lambda _: [], lambda _: [], WINDOW)
    for dashboard in DASHBOARDS.values():
        for panel in dashboard.panels:
            assert (
                "nothing to show" in (html := card.render_panel(panel, source, []))
                or "no answer" in html
            )


def test_queries_are_filled_with_what_was_chosen_and_the_windows_of_grafana() -> None:
    dashboard = DASHBOARDS["training-job"]
    text = fill(
        dashboard,
        'sum(rate(kdist_x{op="a"}[$__rate_interval]))',
        WINDOW,
        chosen={"kdist_job": "d"},
        scrape_seconds=15,
    )
    assert (
        text == 'sum(rate(kdist_x{namespace=~".*", kdist_job=~"d", job=~".+", instance=~".+", '
        'op="a"}[60s]))'
    )
    assert "[100s]" in fill(
        dashboard, "increase(kdist_x{}[$__range])", WINDOW, chosen={}, scrape_seconds=1
    )


def test_a_page_cannot_be_drawn_without_a_prometheus(kdist: Any) -> None:
    done = kdist("dashboards", "preview", "--prometheus", "http://127.0.0.1:9")
    assert done.exit_code == 5
    done = kdist("dashboards", "preview", "--prometheus", "ftp://x")
    assert done.exit_code == 2
    done = kdist("dashboards", "preview", "--prometheus", "http://127.0.0.1:9", "--since", "soon")
    assert done.exit_code == 2
