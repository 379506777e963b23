"""Draws docs/recovery-light.svg and docs/recovery-dark.svg: what the two nodes of a training do
when a rank is killed: the other one keeps its state, and both continue with the next step.

    python docs/draw_recovery.py

The picture is a diagram: its widths are no measured times.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
WIDTH, HEIGHT = 880, 330
LEFT, BAR = 120, 46
ROWS = {"node-0": 70, "node-1": 150, "store": 230}
LABELS = {"node-0": "node-0, rank 0", "node-1": "node-1, rank 1", "store": "checkpoints"}


class Theme(NamedTuple):
    """The colours of one picture."""

    text: str
    line: str
    train: str
    lost: str
    meet: str
    load: str
    saved: str


LIGHT = Theme("#1f2328", "#8c959f", "#b6dcfb", "#ffc1ba", "#ffe2a8", "#d9ccf9", "#1a7f37")
DARK = Theme("#e6edf3", "#7d8590", "#1f4f7a", "#8a2c26", "#6b4d0e", "#4c3a86", "#56d364")


class Bar(NamedTuple):
    """Something that a node does for a while."""

    row: str
    start: int
    end: int
    color: str
    text: str


BARS = (
    Bar("node-0", 0, 290, "train", "steps 90 to 133"),
    Bar("node-1", 0, 250, "train", "steps 90 to 133"),
    Bar("node-0", 290, 340, "lost", "peer lost"),
    Bar("node-1", 250, 300, "lost", "killed, seen"),
    Bar("node-0", 340, 450, "meet", "rendezvous"),
    Bar("node-1", 300, 450, "meet", "new process"),
    Bar("node-0", 450, 560, "load", "sends its state"),
    Bar("node-1", 450, 560, "load", "receives it"),
    Bar("node-0", 560, 740, "train", "steps from 134"),
    Bar("node-1", 560, 740, "train", "steps from 134"),
)


def main() -> None:
    """Write both pictures."""
    for name, theme in (("light", LIGHT), ("dark", DARK)):
        (HERE / f"recovery-{name}.svg").write_text(draw(theme))


def draw(theme: Theme) -> str:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Recovery of a training from the loss of a rank</title>",
    ]
    parts += [
        text(10, top + BAR / 2 + 5, LABELS[row], theme.text, anchor="start")
        for row, top in ROWS.items()
    ]
    for bar in BARS:
        left, width, top = LEFT + bar.start, bar.end - bar.start, ROWS[bar.row]
        parts.append(
            f'<rect x="{left + 1}" y="{top}" width="{width - 2}" height="{BAR}" rx="5" '
            f'fill="{getattr(theme, bar.color)}"/>'
        )
        words = bar.text.split(" ", 1) if width < 60 else [bar.text]
        for line, word in enumerate(words):
            shift = BAR / 2 + 5 + (line - (len(words) - 1) / 2) * 15
            parts.append(text(left + width / 2, top + shift, word, theme.text))
    parts += marks(theme)
    return "\n".join([*parts, "</svg>", ""])


def marks(theme: Theme) -> list[str]:
    """The kill, the generations, the state that is handed over, and the checkpoint."""
    top, middle = ROWS["store"], ROWS["store"] + BAR / 2
    saved, sent, killed = LEFT + 80, LEFT + 505, LEFT + 250
    return [
        text(LEFT + 125, 45, "generation 1", theme.text),
        text(LEFT + 595, 45, "generation 2", theme.text),
        rule(LEFT + 450, 30, LEFT + 450, top - 20, theme.line),
        rule(killed, 30, killed, top - 20, theme.line),
        text(killed, 22, "kill -9 of rank 1", theme.text),
        rule(saved, ROWS["node-1"] + BAR, saved, top, theme.saved),
        f'<circle cx="{saved}" cy="{middle}" r="9" fill="{theme.saved}"/>',
        text(
            saved + 18,
            middle + 5,
            "step 100: read only if no rank has survived",
            theme.text,
            anchor="start",
        ),
        rule(sent, ROWS["node-0"] + BAR, sent, ROWS["node-1"], theme.saved),
        text(LEFT, HEIGHT - 15, "time, not to scale", theme.text, anchor="start"),
    ]


def text(x: float, y: float, words: str, color: str, *, anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{escape(words)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    """A dashed line."""
    ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'<line {ends} stroke="{color}" stroke-width="1.5" stroke-dasharray="5 4"/>'


if __name__ == "__main__":
    main()
