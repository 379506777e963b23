"""Loaders of other libraries keep their positions, and `ShardedLoader` does at any number of
ranks: each sample counts once.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer import ShardedLoader
from kdist_trainer.errors import CheckpointMismatchError, ConfigError, DataError
from kdist_trainer.script.api import ScriptWorld
from tests.draw import read_commit

KINDS = ("torchdata", "streaming", "alone", "sharded")
DRAWN = random.Random(os.environ.get("KDIST_SEED") or read_commit(Path(__file__).parent)).choice(
    KINDS
)
SEEDS = int(os.environ.get("KDIST_SEEDS", "20"))


@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        (DRAWN, 1),
        *(pytest.param(one, SEEDS, marks=[pytest.mark.chaos, pytest.mark.wide]) for one in KINDS),
    ],
)
@pytest.mark.sampled
def test_each_sample_counts_once_whatever_rank_is_killed(kind: str, seeds: int) -> None:
    """With 0, 2 and 4 loader processes, of which a quick run takes 2."""
    command = [sys.executable, "-m", "tests.trainer.script.loader_kills"]
    command += ["--kind", kind, "--seeds", str(seeds)]
    command += ["--workers", "2"] if seeds == 1 and kind != "alone" else []
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.processes
@pytest.mark.sampled
def test_loader_processes_that_have_read_nothing_since_a_resume_keep_their_positions() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from tests.trainer.script.loader_kills import SAMPLES, ResumableDataset, ids, stream

    found: list[int] = []
    saved = None
    for batches in (3, 1, 1, 99):
        loader = StatefulDataLoader(ResumableDataset(stream()), 8, num_workers=2)
        if saved is not None:
            loader.load_state_dict(saved)
        for batch in islice(loader, batches):
            found += ids(batch)
        saved = loader.state_dict()
    assert sorted(found) == list(range(SAMPLES))


class Counting:
    """A loader of twelve batches whose position is a number."""

    def __init__(self, shard: int, shards: int, epoch: int, length: int = 12) -> None:
        self.batches = [(epoch, number) for number in range(shard, length * shards, shards)]
        self.done = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.done < len(self.batches):
            self.done += 1
            yield self.batches[self.done - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.done = saved["done"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(rank: int, size: int) -> None:
        monkeypatch.setattr(ScriptWorld, "current", lambda: ScriptWorld(rank, size, 1))

    choose(0, 1)
    return choose


def test_shards_go_on_on_other_ranks_over_the_ends_of_passes(world: Any) -> None:
    found: Counter[tuple[int, int]] = Counter()
    states: list[dict[str, Any]] = []
    for size, steps in ((2, 5), (3, 7), (6, 1), (1, 12), (2, 0), (3, 11)):
        saved, states = states, []
        for rank in range(size):
            world(rank, size)
            loader = ShardedLoader(Counting, shards=6)
            if saved:
                loader.load_all_state_dicts(saved, rank, size)
            for batches in islice(loader, steps):
                assert len(batches) == 6 // size
                found.update(batches)
            again = ShardedLoader(Counting, shards=6)
            again.load_state_dict(loader.state_dict())
            states.append(again.state_dict())
    assert found == Counter((epoch, number) for epoch in range(3) for number in range(72))


def test_what_cannot_be_divided_or_has_no_position_is_refused(world: Any) -> None:
    world(0, 4)
    with pytest.raises(ConfigError, match="6 shards cannot be divided evenly among 4 ranks"):
        ShardedLoader(Counting, shards=6)
    world(0, 2)
    with pytest.raises(ConfigError, match="a list has no state_dict"):
        next(iter(ShardedLoader(lambda *_: [1], shards=2)))
    with pytest.raises(DataError, match="shard 0 of 2 has no samples"):
        next(iter(ShardedLoader(lambda *_: Counting(0, 2, 0, length=0), shards=2)))
    with pytest.raises(CheckpointMismatchError, match="of 2 shards, and the script has 4"):
        ShardedLoader(Counting, shards=4).load_state_dict(
            ShardedLoader(Counting, shards=2).state_dict()
        )
