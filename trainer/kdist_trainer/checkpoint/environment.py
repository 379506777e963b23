"""What a script's environment says of its checkpoints: who this rank is, and the folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from kdist_trainer import log
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.location import open_location
from kdist_trainer.config import Checkpointing, TrainConfig
from kdist_trainer.errors import ConfigError
from kdist_trainer.liveness import Heartbeat, Phase, heartbeat_path

Manager = TypeVar("Manager", bound=CheckpointManager)
_open: list[tuple[int, CheckpointManager]] = []  # the process, and what has its checkpoints open


@dataclass(frozen=True)
class ScriptWorld:
    """A rank of a script."""

    rank: int
    size: int
    generation: int

    @classmethod
    def current(cls) -> ScriptWorld:
        """This rank in the default process group; alone if there is none."""
        generation = int(os.environ.get("KDIST_GENERATION", "1"))
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), generation)
        return cls(0, 1, generation)


def open_manager(kind: type[Manager], config: Checkpointing) -> Manager | None:
    """Lock the job's checkpoint folder.

    Args:
        kind: what manages it.
        config: how often to save, and what to keep.

    Returns:
        None, with a line in the log, outside kdist and in a job without a checkpoint folder.

    Raises:
        ConfigError: this process has the folder open already.
        CheckpointMismatchError: the folder belongs to another run.
        StorageError: the folder cannot be written.
    """
    world = ScriptWorld.current()
    root, run_id = os.environ.get("KDIST_CHECKPOINTS"), os.environ.get("KDIST_RUN_ID")
    if not root or not run_id:
        if world.rank == 0:
            log.warn(
                "checkpoints-off",
                message=("not started by kdist, or without a checkpoint folder: nothing is saved"),
            )
        return None
    if any(process == os.getpid() for process, _ in _open):
        raise ConfigError(
            "this process has the checkpoints of its job open already, and a second Checkpointer "
            "would lock out the first one: give one Checkpointer all modules and optimizers by "
            "name (model={'a': …, 'b': …}, optimizer={'a': …, 'b': …}), or close() the first one"
        )
    _tell_agent()
    job: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError):
        job = TrainConfig.read(Path(os.environ["KDIST_CONFIG"])).to_job()
    take_over = "KDIST_TAKE_OVER" in os.environ
    manager = kind(
        open_location(root), world=world, run_id=run_id, config=config, job=job, take_over=take_over
    )
    _open.append((os.getpid(), manager))
    return manager


def close_manager(manager: CheckpointManager) -> None:
    """Close what `open_manager` has opened."""
    manager.close()
    _open[:] = [one for one in _open if one[1] is not manager]


def sign_of_life() -> Callable[[], None]:
    """What tells the agent that this script is saving and does not hang, if it sends heartbeats."""
    heartbeat = _attach()

    def beat() -> None:
        if heartbeat is not None and (last := heartbeat.read()).count:
            heartbeat.beat(Phase.SAVE, last.step)

    return beat


def _tell_agent() -> None:
    """Tell the agent that this script continues after a restart: without it a failure ends the job.

    Before the folder is opened, which may fail for a reason that a restart outlasts.
    """
    if (heartbeat := _attach()) is not None:
        heartbeat.mark_checkpoints()


def _attach() -> Heartbeat | None:
    """The heartbeat of this rank; None without an agent."""
    scratch, local_rank = os.environ.get("KDIST_SCRATCH"), os.environ.get("LOCAL_RANK", "0")
    if scratch:
        with suppress(OSError, ValueError):
            return Heartbeat.attach(heartbeat_path(scratch, local_rank))
    return None
