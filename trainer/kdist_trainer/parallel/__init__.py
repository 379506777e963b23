"""How a model is spread over the ranks: one file per strategy, named as the user writes it."""

from __future__ import annotations

from kdist_trainer.parallel.base import Strategy
from kdist_trainer.parallel.data_parallel import DataParallel
from kdist_trainer.parallel.ddp import Ddp
from kdist_trainer.parallel.fsdp import Fsdp
from kdist_trainer.timing import Launcher
from kdist_trainer.world import World

__all__ = ["Strategy", "build"]


def build(name: str, world: World, *, bucket_mib: int, timer: Launcher | None) -> Strategy:
    """The strategy named in job.yaml. Raises `ConfigProblem` where this group of ranks cannot have it."""
    if name == "ddp":
        return Ddp(world, bucket_mib=bucket_mib, timer=timer)
    if name == "data_parallel":
        return DataParallel(world)
    return Fsdp(world, hybrid=name == "hsdp")
