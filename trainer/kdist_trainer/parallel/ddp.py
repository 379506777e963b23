"""Data parallelism: every rank or GPU holds the whole model.

`ddp` averages gradients in buckets while the backward pass still runs. `data_parallel` is torch's
DataParallel: one process copies the model to all GPUs in each step and gathers the outputs on the
first. It is slower than `ddp` with one process per GPU, even on one machine. `Replicated` saves and
restores the state of a model that every rank holds whole.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer import log
from kdist_trainer.distributed import group_abort
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.torch_internals import assigned_buckets


class Replicated(Strategy):
    """Base of the strategies in which each rank holds its tensors whole."""


Buckets = Sequence[Sequence[int]]
"""Of each of DDP's buckets, the numbers of its parameters in the order of `Module.parameters`."""


class Ddp(Replicated):
    """torch's DistributedDataParallel."""

    def __init__(
        self,
        world: World,
        *,
        bucket_mib: int,
        sends_weights: bool = True,
        is_abortable: bool = False,
        buckets: Buckets | None = None,
    ) -> None:
        """Wrap nothing yet. `sends_weights` says whether rank 0 sends its weights to all when the
        model is wrapped, `is_abortable` whether the averaging of gradients ends if the group is
        aborted. `buckets` are those of a former group, to be used again.
        """
        self._world = world
        self._is_abortable = is_abortable and world.size > 1
        self._sends_weights = sends_weights
        self._bucket_mib = bucket_mib
        self._known = buckets
        self._wrapped: DistributedDataParallel
        self._averaging: Averaging | None = None

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:  # noqa: ARG002 - DDP buckets by size
        self.module = model
        self.replica_group = dist.group.WORLD
        devices = [self._world.device] if self._world.device.type == "cuda" else None
        # The loop synchronizes buffers after each step; DDP would do it before the next step, and
        # not at all after the last.
        parameters = list(model.parameters())
        assigned = [[parameters[number] for number in bucket] for bucket in self._known or ()]
        with warnings.catch_warnings(), assigned_buckets(assigned) if assigned else nullcontext():
            # its successor, forward_sync_buffers, would still broadcast the buffers once here
            warnings.simplefilter("ignore", FutureWarning)
            self._wrapped = DistributedDataParallel(
                model,
                device_ids=devices,
                bucket_cap_mb=self._bucket_mib,
                broadcast_buffers=False,
                init_sync=self._sends_weights,
            )
        if self._is_abortable:
            self._averaging = Averaging(parameters, self._world.size, self._known)
            # a lambda, since torch refuses annotations that are text
            self._wrapped.register_comm_hook(
                self._averaging, lambda averaging, bucket: averaging.average(bucket)
            )
        return self._wrapped

    @property
    def buckets(self) -> Buckets | None:
        """DDP's buckets, once they no longer change; None before, and where no rank can continue in
        place.
        """
        return self._known if self._averaging is None else self._averaging.buckets

    def no_sync(self) -> AbstractContextManager[None]:
        return self._wrapped.no_sync()

    def release(self) -> None:
        """Release the wrapper with its buckets, and the group, which is broken. The module stays;
        without this, the wrapper's hooks would run in the backward passes of the next group too.
        """
        del self._wrapped
        self.replica_group = None


@contextmanager
def explain_unused(model: nn.Module) -> Iterator[None]:
    """Within the `with` block, raise `ConfigError` in kdist's words where torch complains about
    parameters without gradient. Not by a method of the wrapper, which would run in each forward
    pass. The model's `requires_grad` is as when it was wrapped.
    """
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    try:
        yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        found = _INDICES.search(str(error))
        indices = [int(one) for one in found[1].split()] if found else []
        names = [trained[one] for one in indices if one < len(trained)]
        frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        which = ", ".join(names[:_MOST_NAMES]) + more if names else "some of the model's parameters"
        if frozen.intersection(names):
            problem = (
                f"no gradient reaches {which} any more: with ddp requires_grad cannot change in "
                "mid-run. To freeze parameters, set the learning rate of their group to 0"
            )
        else:
            problem = (
                f"no gradient reaches {which}, and the ranks average the gradients of all "
                "parameters: remove these, set requires_grad = False, or let the loss depend on "
                "them in every batch (add 0 * parameter.sum())"
            )
        raise ConfigError(problem) from None


_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_MOST_NAMES = 5


class Averaging:
    """Averages the gradients of DDP's buckets, and notes which parameters are in each of them,
    unless that is known.
    """

    def __init__(self, parameters: Sequence[Tensor], size: int, buckets: Buckets | None) -> None:
        self.buckets = buckets
        self._size = size
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._passes: list[list[list[int]]] = [[]]
        """The buckets of each backward pass so far."""

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket, a `dist.GradBucket`."""
        if self.buckets is None:
            self._passes[-1].append([self._numbers[each] for each in bucket.parameters()])
            if bucket.is_last():
                # After the first backward pass DDP lays the buckets again, in the order in which
                # gradients were ready, and from then on they stay.
                if len(self._passes) > 1:
                    self.buckets = self._passes[-1]
                self._passes.append([])
        return all_reduce_abortably(self._size, bucket)


def all_reduce_abortably(size: int, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients, as DDP itself does; its wait ends when the group is aborted.

    The gradients are multiplied by 1/size: DDP does so too, and a division gives other bits.
    """
    averaged: torch.futures.Future[Tensor] = torch.futures.Future()
    gradients = bucket.buffer().mul_(1 / size)
    group_abort.register(averaged)

    def finish(reduced: torch.futures.Future[list[Tensor]]) -> None:
        group_abort.unregister(averaged)
        try:
            result = reduced.value()[0]
        except RuntimeError as error:
            # Its traceback refers to this future, which keeps it: a circle that is never collected,
            # with the frames below it, their gradients and their group.
            bare = error.with_traceback(None)
            with suppress(RuntimeError):  # it was aborted before
                averaged.set_exception(bare)  # type: ignore[arg-type]  # torch's own gap
        else:
            with suppress(RuntimeError):
                averaged.set_result(result)

    group = dist.group.WORLD
    assert group is not None  # noqa: S101 - DDP was made with it
    collective_hooks.all_reduce(gradients, group).get_future().add_done_callback(finish)
    return averaged


class DataParallel(Replicated):
    """torch's DataParallel over all GPUs of the one process."""

    # the first GPU's replica works on the module's own buffers
    replica_group: dist.ProcessGroup | None = None

    def __init__(self, world: World) -> None:
        """Find the GPUs. Raises `ConfigError` if there are several ranks, whose gradients would not
        be averaged.
        """
        if world.size > 1:
            raise ConfigError(
                "train.strategy: data_parallel is one process with several GPUs, and "
                f"this job has {world.size} ranks: "
                "set nodes: 1 and procsPerNode: 1, or use ddp"
            )
        self._devices = torch.cuda.device_count()

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:  # noqa: ARG002 - every GPU gets the whole model
        """Copy the model to all GPUs, or return it unchanged if there are fewer than two; logs
        which.
        """
        self.module = model
        several = self._devices > 1
        log.warn(
            "data-parallel",
            devices=self._devices,
            message=(
                f"the model is copied to {self._devices} GPUs in every step; ddp with one "
                "rank per GPU is faster"
            )
            if several
            else (
                "data_parallel does nothing on fewer than two GPUs: the model trains as in "
                "one process"
            ),
        )
        return nn.DataParallel(model) if several else model
