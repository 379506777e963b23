"""What a checkpoint of a script keeps of each rank: `state`, the objects of `stateful` and the
generators of random numbers; and who gets it when the number of ranks has changed.

All parts are one small value of the checkpoint, which rank 0 writes and every rank reads. Positions
of data loaders take kilobytes; what is large belongs into a module, whose tensors all ranks write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kdist_trainer import log, rng
from kdist_trainer.checkpoint.state_json import encode
from kdist_trainer.checkpoint.values import copy_value
from kdist_trainer.errors import CheckpointMismatchError


class StatefulObject(Protocol):
    """What can be saved as it is, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from a state."""


class Part(NamedTuple):
    """What is saved of one rank."""

    state: dict[Any, Any]
    own: dict[str, Any]
    """The states of `stateful` and of the generators; empty in checkpoints of earlier versions."""


class RankPart:
    """This rank's `state`, its stateful objects and its generators."""

    def __init__(self, stateful: Mapping[str, StatefulObject]) -> None:
        self.state: dict[Any, Any] = {}
        self._stateful = dict(stateful)
        self._generators: dict[str, Any] | None = None
        """As they were saved with the state that was resumed."""

    def read(self) -> Part:
        """The part as it is now, in memory of its own. Raises `UnloadableStateError` if a
        checkpoint cannot hold a value.
        """
        encode(self.state, "Checkpointer.state")
        stateful = {
            name: copy_value(one.state_dict(), f"stateful[{name!r}]")
            for name, one in self._stateful.items()
        }
        generators = copy_value(rng.read_generators(), "generators")
        return Part(self.state, {"stateful": stateful, "generators": generators})

    def load(self, part: Part | None) -> None:
        """Continue from a part; from None, which a rank that is new has, as a rank that begins.

        Raises:
            CheckpointMismatchError: the part has other stateful objects.
        """
        self.state = dict(part.state) if part is not None else {}
        if part is None or not part.own:
            return
        saved = part.own["stateful"]
        problems = [f"it has no {name!r}" for name in self._stateful.keys() - saved]
        problems += [f"the script has no {name!r}" for name in saved.keys() - self._stateful.keys()]
        if problems:
            raise CheckpointMismatchError(
                "the checkpoint is of other objects in Checkpointer(stateful=…): "
                f"{'; '.join(sorted(problems))}; give the same names, or start again with --fresh"
            )
        for name, one in self._stateful.items():
            one.load_state_dict(saved[name])
        self._generators = part.own["generators"]
        self.restore_generators()

    def restore_generators(self) -> None:
        """Have the generators continue as they were saved; nothing without a resumed state."""
        if self._generators is not None:
            rng.restore_generators(self._generators)


def choose_part(parts: Sequence[Part], rank: int) -> Part | None:
    """The part of a rank: that of its number; None if there were fewer ranks."""
    return parts[rank] if rank < len(parts) else None


def report_change(parts: Sequence[Part], size: int) -> None:
    """Log what has no owner now, and which ranks begin without a part. Called on one rank."""
    if len(parts) == size:
        return
    changed = f"the checkpoint has parts of {len(parts)} ranks, and now there are {size}"
    if len(parts) > size:
        left = "; ".join(
            f"rank {rank}: {_describe(part)}" for rank, part in enumerate(parts[size:], start=size)
        )
        message = (
            f"{changed}. Without an owner: {left}. Checkpointer.saved_states has the states of all "
            "ranks; the next checkpoint has only those of the ranks that are there"
        )
    else:
        new = ", ".join(map(str, range(len(parts), size)))
        message = (
            f"{changed}. New: rank {new}, with an empty Checkpointer.state, the objects of "
            "stateful as the script made them and random numbers as it seeded them. "
            "Checkpointer.saved_states has the states of all ranks"
        )
    log.warn("rank-parts-changed", saved=len(parts), ranks=size, message=message)


def _describe(part: Part) -> str:
    """What is in a part, by name."""
    names = [f"state[{key!r}]" for key in part.state]
    names += [f"stateful[{name!r}]" for name in part.own.get("stateful", ())]
    return ", ".join([*names, "random numbers"])
