"""Formats values: times, durations, sizes, rates, counts and ranges for people, names for JSON; and
reads durations.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

T = TypeVar("T")

_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_TIME_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_duration(text: str) -> float:
    """The seconds of a duration as kubectl writes it (`90s`, `5m`, `1h30m`), or of a number. Raises
    `ValueError` with what to write.
    """
    if re.fullmatch(_NUMBER, text):
        return float(text)
    if not re.fullmatch(rf"({_NUMBER}[smhd])+", text):
        raise ValueError(f"`{text:.80}` is not a duration; write 90s, 5m or 1h30m")
    parts = re.findall(rf"({_NUMBER})([smhd])", text)
    return sum(float(number) * _TIME_UNITS[unit] for number, unit in parts)


def seconds(value: object) -> str:
    """A duration for people: 500 µs, 3 ms, 0.21 s, 12 s, 2:05, 1:00:00; nan and inf as they are."""
    if not isinstance(value, int | float) or value != value or abs(value) == math.inf:
        return str(value)
    if 0 < value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.2g} s" if value < 1 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02}:{rest:02}"
        if hours
        else f"{minutes}:{rest:02}"
        if minutes
        else f"{rest} s"
    )


def age(value: float) -> str:
    """A duration of seconds or longer as kubectl shows it: 45s, 5m30s, 25m, 3h10m, 20h, 5d."""
    total = max(0, int(value))
    minutes, hours, days = total // 60, total // 3600, total // 86_400
    if total < 120:
        return f"{total}s"
    if minutes < 10:
        return f"{minutes}m{total % 60}s" if total % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if hours < 192:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    years = days // 365
    return f"{days}d" if years < 2 else f"{years}y{days % 365}d" if days % 365 else f"{years}y"


def moment(unix: float, now: float | None = None) -> str:
    """Unix seconds as a time in the local zone: `10:44:05` where the day is that of `now`, the
    clock's by default, otherwise `2026-11-23 10:44:05`.
    """
    at = datetime.fromtimestamp(unix)
    today = datetime.fromtimestamp(time.time() if now is None else now).date()
    return f"{at:%H:%M:%S}" if at.date() == today else f"{at:%Y-%m-%d %H:%M:%S}"


def size(nbytes: object) -> str:
    """Bytes for people, in binary units."""
    if not isinstance(nbytes, int | float):
        return str(nbytes)
    value, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"


def rate(value: object) -> str:
    """Bytes per second for people, in powers of ten as nccl-tests and makers of networks count
    them.
    """
    if not is_number(value):
        return "-" if value is None else str(value)
    shown, units = float(str(value)), iter(("B/s", "KB/s", "MB/s", "GB/s", "TB/s"))
    unit = next(units)
    while shown >= 1000 and unit != "TB/s":
        shown, unit = shown / 1000, next(units)
    return f"{shown:.3g} {unit}" if shown < 999.5 else f"{shown:.0f} {unit}"


def of_total(done: float, total: float | None) -> str:
    """A number of bytes of a whole in one unit, in powers of ten: `12 of 200 GB`; without a total
    the number alone.
    """
    largest, units = float(done if total is None else total), iter(("B", "kB", "MB", "GB", "TB"))
    unit, factor = next(units), 1.0
    while largest / factor >= 1000 and unit != "TB":
        unit, factor = next(units), factor * 1000
    shown = [_short(each / factor) for each in (done, total) if each is not None]
    return f"{' of '.join(shown)} {unit}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def number(value: object, digits: int = 4) -> str:
    """A measured value with so many significant digits; text (such as "nan") as it is."""
    return (
        f"{value:,.{digits}g}"
        if isinstance(value, float) and abs(value) < 10**digits
        else f"{value:,}"
        if is_number(value)
        else str(value)
    )


def or_dash(value: T | None, show: Callable[[T], str] = number) -> str:
    """A value as `show` has it; `-` if there is none."""
    return "-" if value is None else show(value)


def is_number(value: object) -> bool:
    """Whether the value is a number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def count(number: object, noun: str) -> str:
    """A number with its noun: `1 node`, `2 nodes`."""
    return f"{number} {noun}" if number in (1, "1") else f"{number} {noun}s"


def camel_case(name: str) -> str:
    """A snake_case name as fields of JSON documents are written: `world_size` as `worldSize`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


_UNITS = {
    **{unit: 10.0 ** (3 * power) for power, unit in enumerate(("n", "u", "m", "", *"kMGTPE"), -3)},
    **{f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(
    r"\+?([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE]([+-]?[0-9]{1,2}))?([numkKMGTPE]?i?)"
)


def parse_quantity(text: object) -> float | None:
    """Parse a Kubernetes quantity; None if it is not one."""
    found = (
        _QUANTITY.fullmatch(str(text))
        if isinstance(text, str | int | float) and not isinstance(text, bool)
        else None
    )
    if found is None or found[3] not in _UNITS:
        return None
    return float(found[1]) * 10.0 ** int(found[2] or 0) * _UNITS[found[3]]
