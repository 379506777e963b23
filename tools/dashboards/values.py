"""Values as text in Grafana's units, and the ticks of an axis in one unit."""

from __future__ import annotations

import math
import re
from itertools import pairwise

from kdist.report.chart import Tick, decade_ticks, round_ticks

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = {"Bps": "B/s", "cps": "/s", "flops": "FLOP/s"}
_DECIMAL = ("", "k", "M", "G", "T", "P")


def format_value(value: float, unit: str, *, decimals: int | None = None) -> str:
    """`value` in Grafana's `unit`: none, s, percentunit, bytes, Bps, cps, flops."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "s":
        return _seconds(value, decimals)
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals is None else decimals}f} %"
    if unit == "bytes":
        return _scaled(value, 1024, _BINARY)
    if unit in _RATES:
        text = _scaled(value, 1000, _DECIMAL, decimals=decimals)
        return f"{text}{'' if ' ' in text else ' '}{_RATES[unit]}"
    return _plain(value, decimals)


def _plain(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1e4:
        return _scaled(value, 1000, _DECIMAL).replace(" ", "")
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.2e}"


def _scaled(value: float, base: int, units: tuple[str, ...], *, decimals: int | None = None) -> str:
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value /= base
        power += 1
    if decimals is not None and not power:
        digits = decimals
    else:
        digits = 0 if abs(value) >= 100 or value == int(value) else 1
    return f"{value:,.{digits}f} {units[power]}".rstrip()


def _seconds(value: float, decimals: int | None) -> str:
    size = abs(value)
    if size == 0:
        return "0 s"
    if size < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if size < 1 and not decimals:
        return f"{value * 1e3:.3g} ms"
    if size < 60:
        return f"{value:.{1 if decimals is None and size < 10 else decimals or 0}f} s"
    minutes, seconds = divmod(round(size), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def linear_axis(low: float, high: float, unit: str, *, most: int) -> list[Tick]:
    """Round numbers and their texts, all in one unit, with enough digits to distinguish them.

    Args:
        low: lower end of the axis.
        high: upper end of the axis.
        unit: of the values, as Grafana calls it.
        most: intervals between ticks.
    """
    base, names = (1024, _BINARY) if unit == "bytes" else (1000, _DECIMAL)
    if unit == "s" or not high > low:
        return [(value, format_value(value, unit)) for value in round_ticks(low, high, most=most)]
    size = max(abs(low), abs(high)) * (100 if unit == "percentunit" else 1)
    plain = unit == "percentunit" or (unit == "none" and size < 1e5)
    power = 0 if plain or size < 1 else min(int(math.log(size, base) + 1e-9), len(names) - 1)
    scale = 0.01 if unit == "percentunit" else float(base**power)
    ticks = round_ticks(low / scale, high / scale, most=most)
    name = "%" if unit == "percentunit" else f"{names[power]}{_RATES.get(unit, '')}"
    step = min((after - before for before, after in pairwise(ticks)), default=1.0)
    digits = next(
        (number for number in range(4) if math.isclose(round(step, number), step, rel_tol=1e-6)),
        None,
    )
    largest = max((abs(tick) for tick in ticks), default=0.0)
    mantissa = max(1, math.ceil(math.log10(max(largest / step, 1.0))))
    space = "" if unit == "none" else " "
    return [
        (tick * scale, f"{_digits(tick, digits, mantissa)}{space}{name}".rstrip()) for tick in ticks
    ]


def logarithmic_axis(low: float, high: float, unit: str) -> list[Tick]:
    """Round numbers and their texts, for an axis between two powers of ten."""
    return [(value, format_value(value, unit)) for value in decade_ticks(low, high)]


def _digits(value: float, digits: int | None, mantissa: int) -> str:
    if abs(value) < 1e-12:
        return "0"
    if digits is not None:
        return f"{value:,.{digits}f}"
    return re.sub(r"(\.0*)?e([+-])0*", r"e\2", f"{value:.{mantissa}e}")
