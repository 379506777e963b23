"""Fixtures: a listening exporter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer.metrics.exporter import Exporter
from tests.trainer.metrics.scrape import exporting


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exporter]:
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(tmp_path / "metrics.sock"))
    with exporting(tmp_path) as exporter:
        exporter.set_group(generation=1, world_size=2, local_ranks=[0, 1])
        exporter.set_state("running")
        yield exporter
