"""What must be the same, besides the number of ranks, for bitwise identical results."""

from __future__ import annotations

import torch

from kdist_trainer.config import Training
from kdist_trainer.world import World


def describe_environment(train: Training, world: World) -> str:
    """What must be the same, besides the world size, for bitwise identical results; `ddp` is the
    default and not named.
    """
    replicas = f" with {world.data_size} copies" if world.model_parallel > 1 else ""
    strategy = "" if train.strategy == "ddp" else f"{train.strategy}{replicas}, "
    return f"{strategy}{_describe_machine(world)}"


def _describe_machine(world: World) -> str:
    """The machine's part of the fingerprint."""
    device = (
        torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"
