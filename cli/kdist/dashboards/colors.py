"""Which colour a thing has, the same in Grafana and on our page: by its name where it has one, else by its place in the list.

Every colour is a pair, for light and for dark grounds.
"""

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
"""For things without a colour of their own, in this order."""

STATUS: dict[str, Color] = {
    "good": ("#0a8f4d", "#1fb873"),
    "warning": ("#b97900", "#e0a020"),
    "bad": ("#d03b3b", "#ec6a6a"),
    "neutral": ("#52514e", "#c3c2b7"),
}

_GREY: tuple[Color, ...] = (("#a8a69e", "#6f6e69"), ("#c9c7bf", "#55544f"), ("#dedcd3", "#43423e"))

NAMED: dict[str, Color] = {
    # phases of a step
    "forward": SERIES[0],
    "backward": SERIES[4],
    "optimizer": SERIES[2],
    "comm_exposed": SERIES[1],
    "data_wait": SERIES[3],
    "other": _GREY[1],
    # categories of wall time
    "productive_step": SERIES[2],
    "checkpoint_save": SERIES[4],
    "checkpoint_restore": SERIES[5],
    "evaluation": SERIES[0],
    "rendezvous": SERIES[1],
    "restart": SERIES[7],
    "stalled": ("#8f1d1d", "#ff8a8a"),
    "startup": _GREY[0],
    "init": _GREY[1],
    "idle": _GREY[2],
    # lines that stand for what should be
    "target": _GREY[0],
    "at most": _GREY[0],
    "interval": _GREY[0],
}


def color_of(name: str, index: int) -> Color:
    """The colour of the series `name`, the `index`-th of its panel."""
    return NAMED.get(name, SERIES[index % len(SERIES)])
