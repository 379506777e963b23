"""Where values and times lie in a panel's picture, and how far its axes go."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kdist.dashboards.panels import Panel
from kdist.dashboards.preview import figures
from kdist.dashboards.prometheus import Window

RIGHT, TOP, BOTTOM = 10, 8, 20
_LEFT = 58
_CHARACTER = 6.3  # pixels of one in the text of an axis, at most
_RARE = 0.03
_FAR = 4.0


class Frame:
    """A picture of `width` x `height` for these values; `peak` is a value that the axis does not reach, if there is one."""

    def __init__(self, panel: Panel, values: Sequence[float], window: Window, width: int, height: int) -> None:
        self.window, self.width, self.height = window, width, height
        self.logarithmic = panel.logarithmic
        known = [value for value in values if math.isfinite(value)]
        usual = bound(panel, known)
        self.peak = max(known) if usual is not None else None
        self.low, self.high = limits(panel, known if usual is None else [*(value for value in known if value <= usual), usual])
        self.ticks = self._ticks(panel)
        self.left = max(_LEFT, math.ceil(12 + _CHARACTER * max((len(text) for _, text in self.ticks), default=0)))

    def x(self, at: float) -> float:
        share = (at - self.window.start) / max(1e-9, self.window.end - self.window.start)
        return self.left + share * (self.width - self.left - RIGHT)

    def y(self, value: float) -> float:
        if self.logarithmic:
            share = math.log10(max(value, self.low) / self.low) / max(1e-9, math.log10(self.high / self.low))
        else:
            share = (min(value, self.high) - self.low) / (self.high - self.low)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def _ticks(self, panel: Panel) -> list[tuple[float, str]]:
        if not self.logarithmic:
            return figures.axis(self.low, self.high, panel.unit, most=4 if self.height > 140 else 3)
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        every = max(1, math.ceil((last - first) / 4))
        return [(10.0**power, figures.show(10.0**power, panel.unit)) for power in range(first, last + 1, every)]


def bound(panel: Panel, values: Sequence[float]) -> float | None:
    """How far an axis from 0 needs to go if a few values are so far above the others that those could not be read; else None."""
    if panel.minimum != 0 or panel.maximum is not None or panel.logarithmic or len(values) < 1 / _RARE:
        return None
    usual = sorted(values)[math.floor(len(values) * (1 - _RARE)) - 1]
    return usual * 1.5 if 0 < usual * _FAR < max(values) else None


def limits(panel: Panel, values: Sequence[float]) -> tuple[float, float]:
    """The axis' lower and upper end, the second always greater."""
    if panel.logarithmic:
        known = [value for value in values if value > 0]
        low = 10.0 ** math.floor(math.log10(min(known, default=1.0)))
        high = 10.0 ** math.ceil(math.log10(max(known, default=1.0)))
        return low, high if high > low else low * 10
    low = min(values, default=0.0) if panel.minimum is None else panel.minimum
    high = max(values, default=low) if panel.maximum is None else panel.maximum
    if high > low + abs(low) * 1e-9:
        return low, high + ((high - low) * 0.06 if panel.maximum is None else 0.0)
    if low > 0:
        return 0.0, low * 1.3
    return low - (0.0 if panel.minimum is not None else max(1.0, abs(low) * 0.1)), low + max(1.0, abs(low) * 0.1)
