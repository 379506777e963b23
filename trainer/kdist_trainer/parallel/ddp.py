"""ddp: every rank holds the whole model; gradients are averaged in buckets while the backward pass still runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer.parallel.replicated import Replicated
from kdist_trainer.world import World


class Ddp(Replicated):
    """torch's DistributedDataParallel."""

    def __init__(self, world: World, *, bucket_mib: int) -> None:
        self._world, self._bucket_mib = world, bucket_mib
        self._wrapped: DistributedDataParallel

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:  # noqa: ARG002 - DDP buckets by size
        """Wrap the model; rank 0's weights are sent to all."""
        self.module, self.copies = model, dist.group.WORLD
        devices = [self._world.device] if self._world.device.type == "cuda" else None
        # The loop sends buffers after a step; DDP would before the next one, and not at all after the last.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the word that torch 2.13 has for it is unknown to 2.10
            self._wrapped = DistributedDataParallel(
                model, device_ids=devices, bucket_cap_mb=self._bucket_mib, broadcast_buffers=False
            )
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block stay on the rank."""
        return self._wrapped.no_sync()
