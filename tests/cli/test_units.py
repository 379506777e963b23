"""Numbers as people read them."""

from __future__ import annotations

import pytest

from kdist.units import number, of_total, seconds, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 ms"),
        (0.0031, "3 ms"),
        (0.213, "0.21 s"),
        (1.25, "1.2 s"),
        (9.94, "9.9 s"),
        (12.4, "12 s"),
        (59.6, "1:00"),
        (125, "2:05"),
        (3600, "1:00:00"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (0.0005, "500 µs"),
        ("nan", "nan"),
    ],
)
def test_durations_read_easily(value: object, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1_258_291, "1.2 MiB"), (None, "None")],
)
def test_sizes_read_easily(value: object, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (12345, "12,345"),
        (12345.6, "12,345.6"),
        ("nan", "nan"),
        (True, "True"),
    ],
)
def test_numbers_read_easily(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [
        (12_000_000_000, 200_000_000_000, "12 of 200 GB"),
        (0, 1500, "0 of 1.5 kB"),
        (400_000_000, 3_200_000_000, "0.4 of 3.2 GB"),
        (999, 999, "999 of 999 B"),
        (5_000_000, None, "5 MB"),
        (0, 0, "0 of 0 B"),
        (3e15, 4e15, "3000 of 4000 TB"),
    ],
)
def test_how_much_of_a_whole_is_done_has_one_unit(
    done: float, total: float | None, shown: str
) -> None:
    assert of_total(done, total) == shown
