"""The palette of charts and pages. A color is a pair, for light and for dark backgrounds."""

from __future__ import annotations

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
