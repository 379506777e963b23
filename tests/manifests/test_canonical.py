"""Quantities are written as the API server writes them back, and mean the same."""

from __future__ import annotations

import pytest

from kdist.render.context import cpu, storage


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("2", "2"),
        ("2.0", "2"),
        ("0.2", "200m"),
        ("1.5", "1500m"),
        ("1000m", "1"),
        ("1500m", "1500m"),
        ("0.0004", "1m"),
        ("0", "0"),
    ],
)
def test_cores_are_whole_or_millicores(given: str, written: str) -> None:
    assert cpu(given) == written


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("8Gi", "8Gi"),
        ("2048Mi", "2Gi"),
        ("1048576Ki", "1Gi"),
        ("1000Mi", "1000Mi"),
        ("2000M", "2G"),
        ("1500k", "1500k"),
        ("1024Pi", "1Ei"),
    ],
)
def test_bytes_have_the_largest_unit_that_leaves_a_whole_number(given: str, written: str) -> None:
    assert storage(given) == written
