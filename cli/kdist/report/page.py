"""HTML pages without scripts, fonts or links: elements, the palette, and the frame of a page.

`element` and `join` escape whatever is not a `Markup`, and nothing else makes one, so text from a
job, a log or a label cannot add elements to a page. A color is a pair, for light and for dark
backgrounds; `render_page` adds the stylesheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_VOID = frozenset({"meta"})  # elements that HTML does not close


class Markup(str):
    """Text that is HTML already: it becomes part of a page as it is."""

    __slots__ = ()


def join(*content: str) -> Markup:
    """One piece of markup from several; what is not `Markup` is escaped."""
    return Markup(
        "".join(part if isinstance(part, Markup) else escape(part, quote=False) for part in content)
    )


def element(tag: str, /, *content: str, **attributes: object) -> Markup:
    """One element of HTML or SVG.

    Args:
        tag: its name.
        content: what is inside; text is escaped, `Markup` is not.
        attributes: by name, where `class_` stands for `class` and `text_anchor` for `text-anchor`.
            A float is written with one decimal, and None leaves the attribute out.
    """
    head = ""
    for key, value in attributes.items():
        if value is not None:
            shown = f"{value:.1f}" if isinstance(value, float) else escape(str(value))
            head += f' {key.rstrip("_").replace("_", "-")}="{shown}"'
    end = "" if tag in _VOID else f"{join(*content)}</{tag}>"
    return Markup(f"<{tag}{head}>{end}")


Color = tuple[str, str]

SERIES: tuple[Color, ...] = (
    ("#2a78d6", "#3987e5"),
    ("#eb6834", "#d95926"),
    ("#1baf7a", "#199e70"),
    ("#eda100", "#c98500"),
    ("#4a3aa7", "#9085e9"),
    ("#e87ba4", "#d55181"),
    ("#008300", "#4caf50"),
    ("#e34948", "#e66767"),
)
"""For series without a color of their own, in this order."""

STATUS: dict[str, Color] = {
    "good": ("#0a8f4d", "#1fb873"),
    "warning": ("#b97900", "#e0a020"),
    "bad": ("#d03b3b", "#ec6a6a"),
    "neutral": ("#52514e", "#c3c2b7"),
}

GREYS: tuple[Color, ...] = (("#a8a69e", "#6f6e69"), ("#c9c7bf", "#55544f"), ("#dedcd3", "#43423e"))

DARK_RED: Color = ("#8f1d1d", "#ff8a8a")


def paint(color: Color) -> str:
    """The color as CSS: the browser chooses by the page's color scheme."""
    return f"light-dark({color[0]},{color[1]})"


STYLE = """
:root {
  --ground: light-dark(#f4f3ef, #121211); --card: light-dark(#ffffff, #1c1c1a);
  --edge: light-dark(#e3e1d9, #2d2d2a); --grid: light-dark(#eceae4, #292926);
  --ink: light-dark(#141413, #f2f1ec); --soft: light-dark(#5d5b55, #a9a79f);
  --faint: light-dark(#8d8b83, #7b7a74);
}
* { box-sizing: border-box; margin: 0 }
body { background: var(--ground); color: var(--ink); padding: 28px 32px 20px; margin: auto;
  font: 13px/1.45 Inter, "Segoe UI", system-ui, -apple-system, "Helvetica Neue", "DejaVu Sans",
  sans-serif;
  font-variant-numeric: tabular-nums }
h1 { font-size: 23px; font-weight: 650; letter-spacing: -0.015em }
.soft { color: var(--soft) }
svg { width: 100%; display: block }
.rule { stroke: var(--grid); stroke-width: 1 }
.tick { fill: var(--faint); font-size: 10.5px }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round }
.event { stroke-width: 1.4; stroke-dasharray: 4 3; opacity: .9 }
table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: 6px 12px; border-bottom: 1px solid var(--edge) }
th { font-weight: 550; color: var(--soft) } td { font-weight: 500 }
th:first-child { text-align: left; color: var(--ink) }
"""
"""The stylesheet of every page."""

DOCUMENT = """
body { font-size: 15px; max-width: 960px }
h2 { font-size: 16px; margin: 28px 0 8px }
p { margin: 4px 0 8px }
svg { background: var(--card); border: 1px solid var(--edge); border-radius: 9px }
th, td { text-align: left }
"""
"""What a page adds that is read from top to bottom, as a report."""


def render_page(
    title: str, *body: Markup, style: str = DOCUMENT, scheme: str = "light dark"
) -> str:
    """A whole page. `style` follows the rules of `STYLE`; `scheme` is CSS's: `light`, `dark`, or
    both for what the reader's system prefers.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width"),
        element("title", title),
        element("style", Markup(STYLE + style)),
    )
    html = element("html", head, element("body", *body), lang="en", style=f"color-scheme:{scheme}")
    return f"<!doctype html>\n{html}\n"


def table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table. The first cell of a row is its header."""
    lines = [
        element("tr", element("th", first), *(element("td", cell) for cell in cells))
        for first, *cells in rows
    ]
    return element("table", element("tr", *(element("th", cell) for cell in header)), *lines)


def swatch(color: Color) -> Markup:
    """A small square that stands for what is drawn in this color."""
    return element("i", style=f"background:{paint(color)}")
