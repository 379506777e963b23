"""`kdist_trainer.ShardedLoader`: the data of a script that goes on at any number of ranks, whatever
library reads it.

The saved position of a loader is valid only at the number of ranks that it was saved with. Here
each virtual shard has a loader and a position of its own, and whole shards are assigned to ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kdist_trainer.errors import CheckpointMismatchError, ConfigError, DataError
from kdist_trainer.script.api import ScriptWorld


@dataclass
class _Pass:
    """One pass of a shard over its samples."""

    epoch: int = 0
    saved: Any = None
    """The state that it begins with; None at the start."""
    loader: Any = None
    batches: Any = None
    is_empty: bool = True


class ShardedLoader:
    """One loader for each virtual shard, and equally many shards for each rank.

    Each item is a list with the next batch of each of the rank's shards: a step, whose samples are
    the same at any number of ranks. It never ends: a shard begins its next pass when its loader
    ends, with a new loader.

        loader = ShardedLoader(make_loader, shards=6)  # for 1, 2, 3 or 6 ranks
        for step, batches in zip(range(checkpointer.resume() + 1, steps + 1), loader):
            for batch in batches:
                (loss_of(batch) / len(batches)).backward()
    """

    def __init__(self, make_loader: Callable[[int, int, int], Any], *, shards: int) -> None:
        """Create it after `init_process_group`; loaders are made when they are first used.

        Args:
            make_loader: called as `make_loader(shard, shards, epoch)`, returns the loader of that
                shard: an iterable with `state_dict` and `load_state_dict`.
            shards: number of virtual shards, a multiple of every number of ranks that the job may
                have.

        Raises:
            ConfigError: the shards cannot be divided evenly among the ranks.
        """
        world = ScriptWorld.current()
        if shards < 1 or shards % world.size:
            raise ConfigError(
                f"ShardedLoader: {shards} shards cannot be divided evenly among {world.size} "
                "ranks: choose a multiple of each number of ranks that the job may have"
            )
        self._make_loader = make_loader
        self._shards = shards
        each = shards // world.size
        self._passes = {
            shard: _Pass() for shard in range(world.rank * each, (world.rank + 1) * each)
        }

    def __iter__(self) -> Iterator[list[Any]]:
        """Go on where the last iterator has stopped."""
        while True:
            yield [self._next(shard) for shard in self._passes]

    def state_dict(self) -> dict[str, Any]:
        """The pass of each of the rank's shards, and the position in it."""
        passes = {
            shard: (one.epoch, one.saved if one.loader is None else one.loader.state_dict())
            for shard, one in self._passes.items()
        }
        return {"shards": self._shards, "passes": passes}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a state that was saved at the same number of ranks.

        Raises:
            CheckpointMismatchError: it is of another number of shards.
        """
        if saved["shards"] != self._shards:
            raise CheckpointMismatchError(
                f"ShardedLoader: the checkpoint is of {saved['shards']} shards, and the script has "
                f"{self._shards}: set shards={saved['shards']}, or start again with --fresh"
            )
        self._passes = {shard: _Pass(*saved["passes"][shard]) for shard in self._passes}

    def load_all_state_dicts(
        self,
        states: Sequence[dict[str, Any]],
        rank: int,  # noqa: ARG002 - it knows its shards
        world_size: int,  # noqa: ARG002
    ) -> None:
        """Continue at any number of ranks, from the states of all ranks.

        Raises:
            CheckpointMismatchError: they are of another number of shards.
        """
        passes = {shard: one for state in states for shard, one in state["passes"].items()}
        self.load_state_dict({"shards": states[0]["shards"], "passes": passes})

    def _next(self, shard: int) -> Any:
        """The next batch of a shard."""
        while True:
            one = self._passes[shard]
            if one.loader is None:
                one.loader = self._make_loader(shard, self._shards, one.epoch)
                if not hasattr(one.loader, "state_dict"):
                    raise ConfigError(
                        f"ShardedLoader: a {type(one.loader).__name__} has no state_dict, so it "
                        "loses its position: let make_loader return torchdata's "
                        "StatefulDataLoader, or a set with a state"
                    )
                if one.saved is not None:
                    one.loader.load_state_dict(one.saved)
                one.batches = iter(one.loader)
            for batch in one.batches:
                one.is_empty = False
                return batch
            if one.is_empty and one.saved is None:
                raise DataError(f"ShardedLoader: shard {shard} of {self._shards} has no samples")
            self._passes[shard] = _Pass(one.epoch + 1)
