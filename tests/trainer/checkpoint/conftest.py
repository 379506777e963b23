"""What all tests of checkpoints share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainer.checkpoint.states import load, open_store, save


def pytest_configure(config: pytest.Config) -> None:
    """Saving by one rank alone is meant so; the trainer silences DCP's warning of it, pytest would
    show it again.
    """
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 and 2, its lock released."""
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    store = open_store(root)
    load(store)
    for step in (1, 2):
        assert save(store, step).ok
    store.close()
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints", symlinks=True))
