"""The card of a panel, also for odd answers of a Prometheus."""

from __future__ import annotations

from kdist.report.page import STATUS, paint
from tools.dashboards import DASHBOARDS
from tools.dashboards.model import Kind, Panel, bars, lines, stat
from tools.dashboards.panel import PanelSource, render_panel
from tools.dashboards.prometheus import Series, Window

WINDOW = Window(1000.0, 1100.0, 1.0)


def test_a_legend_shows_what_fits_and_counts_the_rest() -> None:
    def drawn(number: int) -> str:
        answer = [
            Series({"rank": f"{rank}"}, ((1000.0, 1.0), (1001.0, 2.0))) for rank in range(number)
        ]
        return render_panel(
            lines("l", "d", "none", {"rank {{rank}}": "x{}"}, width=6),
            PanelSource(lambda _: answer, lambda _: answer, WINDOW),
            [],
        )

    assert drawn(4).count("<span><i") == 4
    assert " more<" not in drawn(4)
    many = drawn(64)
    shown = many.count("<span><i")
    assert 4 < shown < 20
    assert f"<span>{64 - shown} more</span>" in many


def test_names_from_labels_cannot_add_to_the_page() -> None:
    evil = {"rank": "<script>alert(1)</script>", "namespace": "&", "kdist_job": "<b>"}
    answer = [Series(evil, ((1000.0, 1.0), (1001.0, 2.0), (1002.0, 3.0)))]
    source = PanelSource(lambda _: answer, lambda _: answer, WINDOW)
    table = Panel(title="t", description="d", kind=Kind.TABLE, queries={"a": "x{}"}, unit="none")
    shown = [
        lines("l", "d", "none", {"rank {{rank}}": "x{}"}),
        bars("b", "d", "none", {"{{rank}}": "x{}"}),
        table,
    ]
    for panel in [*shown, stat("s", "d", "x{}", "none")]:
        html = render_panel(panel, source, [])
        assert "<script" not in html
        assert "<b><b>" not in html


def test_the_table_of_trainings_names_their_state_and_colors_what_is_bad() -> None:
    (table,) = [panel for panel in DASHBOARDS["fleet"].panels if panel.kind is Kind.TABLE]
    job = {"namespace": "ml", "kdist_job": "digits"}
    answers = {
        table.queries["State"]: [
            Series({**job, "state": word}, ((1000.0, 1.0),)) for word in ("running", "hung")
        ],
        table.queries["Skew"]: [Series(job, ((1000.0, 1.5),))],
    }
    html = render_panel(
        table, PanelSource(lambda _: [], lambda query: answers.get(query, []), WINDOW), []
    )
    assert "<td>hung, running</td>" in html
    assert f'color:{paint(STATUS["bad"])}">1.5</span>' in html
    assert html.count("<td>-</td>") == len(table.queries) - 2


def test_a_panel_without_an_answer_says_so() -> None:
    source = PanelSource(lambda _: [], lambda _: [], WINDOW)
    for dashboard in DASHBOARDS.values():
        for panel in dashboard.panels:
            assert (
                "nothing to show" in (html := render_panel(panel, source, []))
                or "no answer" in html
            )
