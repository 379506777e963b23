"""What all tests of checkpoints share."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Saving by one rank alone is meant so; the trainer silences DCP's warning of it, pytest would show it again."""
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled:UserWarning")
