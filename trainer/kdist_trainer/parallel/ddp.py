"""ddp: every rank holds the whole model; gradients are averaged in buckets while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer.parallel.replicated import Replicated
from kdist_trainer.timing import Launcher
from kdist_trainer.world import World


class Ddp(Replicated):
    """torch's DistributedDataParallel, its all-reduces timed where a timer is given."""

    def __init__(self, world: World, *, bucket_mib: int, timer: Launcher | None) -> None:
        self._world, self._bucket_mib, self._timer = world, bucket_mib, timer
        self._wrapped: DistributedDataParallel

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:  # noqa: ARG002 - DDP buckets by size
        """Wrap the model; rank 0's weights and buffers are sent to all."""
        self.module = model
        devices = [self._world.device] if self._world.device.type == "cuda" else None
        self._wrapped = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=self._bucket_mib)
        if self._timer is not None:
            launch = self._timer.launch
            # DDP compares the hook's annotations with types, which they are not under postponed evaluation: hence a lambda.
            self._wrapped.register_comm_hook(None, lambda _, bucket: launch(bucket))
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block stay on the rank."""
        return self._wrapped.no_sync()
