"""What the words of `kdist port-forward` mean."""

from __future__ import annotations

import pytest

from kdist.commands.port_forward import read_port
from kdist.errors import UsageError


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("metrics", (9401, 9401)),
        ("8080:9401", (8080, 9401)),
        (":6006", (0, 6006)),
        ("9401", (9401, 9401)),
    ],
)
def test_a_port_is_a_name_or_a_number_or_two(text: str, ports: tuple[int, int]) -> None:
    assert read_port(text) == ports


@pytest.mark.parametrize("text", ["", "x", "0", "70000", "1:2:3", "70000:80", "-1"])
def test_anything_else_is_no_port(text: str) -> None:
    with pytest.raises(UsageError, match="is not a port"):
        read_port(text)
