"""Numbers for people: in their unit, with as many digits as say something; and the ticks of an axis."""

from __future__ import annotations

import math
import re
from itertools import pairwise

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = {"Bps": "B/s", "cps": "/s", "flops": "FLOP/s"}
_DECIMAL = ("", "k", "M", "G", "T", "P")


def show(value: float, unit: str, *, decimals: int | None = None) -> str:
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
    digits = decimals if decimals is not None and not power else 0 if abs(value) >= 100 or value == int(value) else 1
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


def axis(low: float, high: float, unit: str, *, most: int) -> list[tuple[float, str]]:
    """Round numbers between `low` and `high` and their texts: all in one unit, with the digits that tell them apart."""
    base, names = (1024, _BINARY) if unit == "bytes" else (1000, _DECIMAL)
    if unit == "s" or not high > low:
        return [(value, show(value, unit)) for value in ticks(low, high, most=most)]
    size = max(abs(low), abs(high)) * (100 if unit == "percentunit" else 1)
    plain = unit == "percentunit" or (unit == "none" and size < 1e5)
    power = 0 if plain or size < 1 else min(int(math.log(size, base) + 1e-9), len(names) - 1)
    scale = 0.01 if unit == "percentunit" else float(base**power)
    places = ticks(low / scale, high / scale, most=most)
    name = "%" if unit == "percentunit" else f"{names[power]}{_RATES.get(unit, '')}"
    apart = min((after - before for before, after in pairwise(places)), default=1.0)
    digits = next((number for number in range(4) if math.isclose(round(apart, number), apart, rel_tol=1e-6)), None)
    space = "" if unit == "none" else " "
    return [(place * scale, f"{_digits(place, digits)}{space}{name}".rstrip()) for place in places]


def _digits(value: float, digits: int | None) -> str:
    if abs(value) < 1e-12:
        return "0"
    return f"{value:,.{digits}f}" if digits is not None else re.sub(r"(\.0)?e([+-])0*", r"e\2", f"{value:.1e}")


def ticks(low: float, high: float, *, most: int = 4) -> list[float]:
    """Round numbers that divide the way from `low` to `high`, at most so many steps."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    size = 10 ** math.floor(math.log10(rough))
    step = next((factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough * 0.999), 10 * size)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(start: float, end: float, *, most: int) -> list[float]:
    """Round times between two Unix times."""
    sizes = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((size for size in sizes if (end - start) / size <= most), 86400)
    return [float(step * number) for number in range(math.ceil(start / step), math.floor(end / step) + 1)]
