"""The goodput report of a run as one HTML page: the share of each category, the loss curve, and the
timeline of the attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdist.report import text
from kdist.report.chart import (
    BOTTOM,
    TOP,
    Plot,
    Point,
    decade_ticks,
    round_ticks,
    svg,
    tick_text,
    time_ticks,
)
from kdist.report.page import (
    DARK_RED,
    DOCUMENT,
    GREYS,
    SERIES,
    STATUS,
    Color,
    Markup,
    element,
    join,
    paint,
    render_page,
    swatch,
    table,
)
from kdist.report.text import LABELS
from kdist.units import number, seconds

COLORS: dict[str, Color] = {
    "queue": GREYS[0],
    "imagePull": SERIES[0],
    "fetch": SERIES[6],
    "rendezvous": SERIES[1],
    "start": SERIES[5],
    "productive": SERIES[2],
    "allReduceWait": SERIES[3],
    "checkpoint": SERIES[4],
    "lost": SERIES[7],
    "down": DARK_RED,
    "unobserved": GREYS[2],
    "other": GREYS[1],
}

_WIDTH, _LOSS_HEIGHT, _ROW_HEIGHT, _BAR_HEIGHT = 920, 260, 22, 34
_STYLE = """
.goodput { font-size: 44px; font-weight: 650; letter-spacing: -1px; margin: 12px 0 0 }
td i, th i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 8px }
"""


def render_report(report: Mapping[str, Any]) -> str:
    """The page of a goodput report, as `build_goodput_report` makes it, with the job's name."""
    name, goodput = str(report.get("job", "run")), report.get("goodput")
    elapsed = seconds(report["elapsedSeconds"])
    attempts = report["attempts"]
    restarts = [float(attempt["fromStep"]) for attempt in attempts[1:]]
    failures = [
        (str(attempt["generation"]), _describe_failure(attempt))
        for attempt in attempts
        if attempt.get("failure")
    ]
    colors = {label: COLORS[category] for category, label in LABELS.items()}
    sections = [
        element("h1", name),
        element("p", text.summary(report), class_="soft"),
        *(element("p", remark) for remark in text.remarks(report)),
        element("p", f"{goodput:.1%}" if goodput is not None else "-", class_="goodput"),
        element(
            "p",
            f"goodput: the share of {elapsed} that went into steps that count, waiting for peers "
            "included",
            class_="soft",
        ),
        render_shares(report["secondsByCategory"]),
        element("h2", "Where the time went"),
        table(
            ("category", "time", "share"),
            [
                (join(swatch(colors[label]), label) if label in colors else label, *cells)
                for label, *cells in text.totals(report)
            ],
        ),
        element("h2", "Loss, and where an attempt began"),
        render_loss(report["lossCurve"], restarts),
        element("h2", "Wall time by attempt; the steps of an attempt are summed up"),
        render_timeline(attempts),
        element("h2", "Attempts"),
        table([cell.lower() for cell in text.ATTEMPTS], text.attempts(report)),
        *(element("p", line, class_="soft") for line in text.environment(report)),
    ]
    if failures:
        sections += [element("h2", "What ended them"), table(("attempt", "failure"), failures)]
    fills = "".join(
        f"rect.{category} {{ fill: {paint(color)} }}\n" for category, color in COLORS.items()
    )
    return render_page(f"{name}: goodput report", *sections, style=DOCUMENT + _STYLE + fills)


def _describe_failure(attempt: Mapping[str, Any]) -> str:
    failure = attempt["failure"]
    known = [name for name in ("rank", "node", "machine", "step") if failure.get(name) is not None]
    where = ", ".join(f"{name} {failure[name]}" for name in known)
    return f"{attempt['endedBy']} ({where}): {failure.get('message') or ''}"


def render_loss(points: Sequence[Sequence[float]], restarts: Sequence[float]) -> Markup:
    """The loss over the steps, logarithmic if it spans more than a decade; `restarts` are the steps
    from which a later attempt began.
    """
    if len(points) < 2:
        return element("p", "There are too few steps to draw a loss.")
    curve: list[Point] = [(step, loss) for step, loss in points]
    losses = [loss for _, loss in curve]
    low, high = min(losses), max(losses)
    logarithmic = low > 0 and high / low > 10
    first, last = curve[0][0], curve[-1][0]
    plot = Plot(
        _WIDTH, _LOSS_HEIGHT, x=(first, last), y=(low, high), logarithmic="y" if logarithmic else ""
    )
    ticks = decade_ticks(low, high, most=8) if logarithmic else round_ticks(low, high, most=5)
    steps = round_ticks(first, last, most=8)
    return plot.render(
        "loss over steps",
        plot.y_axis((value, number(float(f"{value:.6g}"), 3)) for value in ticks),
        plot.x_axis((step, number(round(step))) for step in steps),
        tick_text("step", plot.left - 8, plot.floor + 16, anchor="end"),
        *(
            plot.mark(step, class_="event", style=f"stroke:{paint(STATUS['bad'])}")
            for step in restarts
        ),
        plot.line(curve, style=f"stroke:{paint(SERIES[0])}"),
    )


def render_timeline(attempts: Sequence[Mapping[str, Any]]) -> Markup:
    """One row per attempt over the wall time, each span in its category's color."""
    spans = [span for attempt in attempts for span in attempt["spans"]]
    if not spans:
        return element("p", "There are no attempts yet.")
    start = float(min(since for _, since, _ in spans))
    length = max(until for _, _, until in spans) - start
    height = TOP + len(attempts) * _ROW_HEIGHT + BOTTOM
    plot = Plot(_WIDTH, height, x=(0.0, length), y=(0.0, 1.0))
    rows = []
    for index, attempt in enumerate(attempts):
        top = TOP + index * _ROW_HEIGHT
        rows.append(tick_text(str(attempt["generation"]), plot.left - 8, top + 12, anchor="end"))
        for category, since, until in attempt["spans"]:
            left, right = plot.x(since - start), plot.x(until - start)
            shown = f"{LABELS.get(category, category)}: {seconds(until - since)}"
            size = {"width": max(right - left, 0.5), "height": _ROW_HEIGHT - 6}
            title = element("title", shown)
            rows.append(element("rect", title, class_=category, x=left, y=top, **size))
    times = round_ticks(0.0, length, most=8) if length < 4 else time_ticks(0.0, length, most=8)
    axis = plot.x_axis((at, seconds(at) if at else "0") for at in times)
    return plot.render("wall time of each attempt by category", *rows, axis)


def render_shares(by_category: Mapping[str, float]) -> Markup:
    """The whole run as one bar of its categories, given in seconds."""
    total = sum(by_category.values())
    left, parts = 0.0, []
    for category, label in LABELS.items():
        part = by_category.get(category, 0.0)
        if part > 0 and total > 0:
            width = part / total * _WIDTH
            title = element("title", f"{label}: {seconds(part)}, {part / total:.1%}")
            size = {"width": width, "height": _BAR_HEIGHT}
            parts.append(element("rect", title, class_=category, x=left, y=0, **size))
            left += width
    return svg(_WIDTH, _BAR_HEIGHT, "share of each category", *parts)
