"""A rank's random numbers in a framework's checkpoint go on; another number of ranks is told."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from kdist_trainer.integrations import framework
from kdist_trainer.numerics import rng


def draw() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.rand())


def test_each_rank_goes_on_with_its_own_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = {}
    for rank in range(2):
        torch.manual_seed(rank)
        framework.save_generators(tmp_path, rank, epoch_ended=rank == 1)
        expected[rank] = draw()
    assert expected[0] != expected[1]
    for rank in range(2):
        found = framework.load_generators(tmp_path, rank, 2)
        assert found["epoch_ended"] is (rank == 1)
        rng.restore_generators(found["generators"])
        assert draw() == expected[rank]
    assert "rank-parts-changed" not in capfd.readouterr().err
    assert framework.load_generators(tmp_path, 2, 3) == {}
    framework.load_generators(tmp_path, 0, 3)
    assert "of 2 ranks, and now there are 3" in capfd.readouterr().err
