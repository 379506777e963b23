"""The frame of a page and its tables."""

from __future__ import annotations

from kdist.report.page import element, render_page, table


def test_a_page_has_a_title_a_stylesheet_and_a_color_scheme() -> None:
    page = render_page("<digits>", element("p", "text"), style="p { margin: 0 }", scheme="dark")
    assert page.startswith("<!doctype html>")
    assert "<title>&lt;digits&gt;</title>" in page
    assert "p { margin: 0 }" in page
    assert 'style="color-scheme:dark"' in page
    assert page.endswith("<body><p>text</p></body></html>\n")


def test_a_table_begins_each_row_with_its_header() -> None:
    assert table(("name", "value"), [("a&b", "1")]) == (
        "<table><tr><th>name</th><th>value</th></tr><tr><th>a&amp;b</th><td>1</td></tr></table>"
    )
