"""Strategies of parallel training: one module per strategy, named as in job.yaml.

Read `base` first: what a strategy does with the model, its gradients and its state. `ddp` also has
`data_parallel`, `fsdp` also `hsdp`; `pipeline` has the stages of a model and the order of their
passes. `buffers` keeps buffers such as running means equal on all ranks. Which samples a rank gets
is in `data`, how the passes of a step are made in `training.forward_backward`.
"""

from __future__ import annotations

from kdist_trainer.config import Training
from kdist_trainer.distributed.world import World
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.parallel.ddp import Buckets, DataParallel, Ddp
from kdist_trainer.parallel.fsdp import Fsdp
from kdist_trainer.parallel.pipeline import Pipeline
from kdist_trainer.parallel.tensor import Tensor
from kdist_trainer.workload import Workload


def build(
    train: Training,
    workload: Workload,
    world: World,
    *,
    sends_weights: bool = True,
    is_abortable: bool = False,
    buckets: Buckets | None = None,
) -> Strategy:
    """Build the strategy that job.yaml names. The options are those of `Ddp`. Raises `ConfigError`
    if these ranks cannot use the strategy.
    """
    match train.strategy:
        case "ddp":
            return Ddp(
                world,
                bucket_mib=train.bucket_mib,
                sends_weights=sends_weights,
                is_abortable=is_abortable,
                buckets=buckets,
            )
        case "data_parallel":
            return DataParallel(world)
        case "pipeline":
            return Pipeline(world, schedule=train.pipeline.schedule)
        case "tensor":
            return Tensor(world, workload)
        case "fsdp" | "hsdp":
            return Fsdp(world, hybrid=train.strategy == "hsdp", offload=train.offload == "cpu")
