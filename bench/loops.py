"""The contestants of bench.step: the same work under a loop written by hand, under kdist, and under
Lightning Fabric.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.ranks import environment
from bench.work import Work
from kdist_trainer import worker
from kdist_trainer.config import Checkpointing, Every, Nodes, Optimizer, TrainConfig, Training
from kdist_trainer.distributed.world import leave
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.workload import WorkloadContext

Size = dict[str, Any]

_COUNTS_GPUS = "PYTORCH_NVML_BASED_CUDA_CHECK"
# Lightning sets it when it is imported. On a machine without a GPU each step of an optimizer then
# takes 0.1 ms longer: Lightning's own pay for it, and no other's.
os.environ.pop(_COUNTS_GPUS, None)


def by_hand(
    size: Size,
    work: Work,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], None],
) -> None:
    """The loop as one writes it by hand; every rank takes its share of each epoch's permutation."""
    inputs, labels = work.dataset("train").tensors
    share, place = size["batch"] // size["ranks"], int(os.environ["RANK"])
    per_epoch = len(inputs) // size["batch"]
    draw = torch.Generator().manual_seed(0)
    order = torch.empty(0)
    for step in range(size["steps"]):
        if step % per_epoch == 0:
            order = torch.randperm(len(inputs), generator=draw)
        first = step % per_epoch * size["batch"] + place * share
        chosen = order[first : first + share]
        optimizer.zero_grad()
        total, count = work.loss(model, (inputs[chosen], labels[chosen]))
        backward(total / count)
        optimizer.step()


def bare(size: Size) -> None:
    """Torch's DistributedDataParallel and nothing else."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = make(size)
    model = DistributedDataParallel(work.model())
    by_hand(
        size, work, model, optimizer=work.optimizer(model, Optimizer()), backward=Tensor.backward
    )
    leave()


def fabric(size: Size) -> None:
    """Lightning Fabric's DDP strategy with its own setup and backward."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with environment(TORCHELASTIC_RUN_ID="bench", GROUP_RANK="0", **{_COUNTS_GPUS: "1"}):
        trainer = Fabric(
            accelerator="cpu",
            devices=size["ranks"],
            strategy=DDPStrategy(process_group_backend="gloo"),
        )
        trainer.launch()
        work = make(size)
        module = work.model()
        model, optimizer = trainer.setup(module, work.optimizer(module, Optimizer()))
        by_hand(size, work, model, optimizer=optimizer, backward=trainer.backward)
    leave()


def kdist_off(size: Size) -> None:
    """Kdist's loop alone: nothing is timed, and there is nobody to report to."""
    kdist(size, timing="off", KDIST_METRICS_SOCKET=None, KDIST_SCRATCH=None)


def kdist_on(size: Size) -> None:
    """Kdist's loop with timed all-reduces, its heartbeat and its records for the exporter."""
    folder = size["folder"]
    kdist(size, timing="on", KDIST_METRICS_SOCKET=f"{folder}/metrics.sock", KDIST_SCRATCH=folder)


def kdist(size: Size, *, timing: Any, **variables: str | None) -> None:
    """A whole training of `worker.main`, as an agent starts it."""
    config = TrainConfig(
        name="bench",
        nodes=Nodes(min=1, max=1),
        procs_per_node=size["ranks"],
        train=Training(
            workload="bench.work:Work",
            options={"width": size["width"], "depth": size["depth"], "norms": size.get("norms", 0)},
            steps=size["steps"],
            global_batch=size["batch"],
            evaluate="never",
            collective_timing=timing,
            checkpoint=Checkpointing(every=Every(steps=10**9)),
        ),
    )
    path = Path(size["folder"], f"train-{timing}-{os.environ['RANK']}.json")
    path.write_text(config.to_json())
    with environment(
        KDIST_CONFIG=str(path),
        KDIST_GENERATION="1",
        KDIST_RUN_ID="bench",
        KDIST_NODE="node-0",
        **variables,
    ):
        try:
            worker.main()
        finally:
            for listener in list(
                collective_hooks.launch_hooks
            ):  # kdist's must not slow the next one
                collective_hooks.unregister_launch_hook(listener)


def make(size: Size) -> Work:
    """The work, with the same weights for everybody."""
    torch.manual_seed(0)
    return Work(WorkloadContext({"width": size["width"], "depth": size["depth"]}))


BARE = "bare DDP loop"
CONTESTANTS = {
    BARE: bare,
    "kdist, nothing measured": kdist_off,
    "kdist, all measured": kdist_on,
    "Lightning Fabric": fabric,
}
