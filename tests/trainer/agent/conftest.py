"""What the agent's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kdist_trainer import log


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines that the agent logs."""
    lines: list[str] = []
    log.write_to(lambda line: lines.append(line.decode()))
    yield lines
    log.write_to(None)
