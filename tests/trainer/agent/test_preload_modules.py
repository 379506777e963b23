"""What agents and workers import before their work begins."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from kdist_trainer.agent import preload_modules


def test_modules_are_imported_without_a_garbage_collection_and_one_that_fails_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_at_import.py").write_text("raise OSError\n")
    (tmp_path / "large_at_import.py").write_text("kept = [[] for _ in range(100_000)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    collections: list[str] = []

    def note(phase: str, _: object) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        preload_modules.import_all(["broken_at_import", "large_at_import"])
        assert not collections
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert len(sys.modules.pop("large_at_import").kept) == 100_000
