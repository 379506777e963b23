"""Synchronizes a model's buffers: state such as running means, which no optimizer updates and each
rank computes from its own samples.

After every step all ranks take over the buffers of the first model replica, so that a checkpoint,
an evaluation and the hash of the weights see one model. Buffers that training does not change, such
as masks, are not sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import SyncBatchNorm

from kdist_trainer import log
from kdist_trainer.torch_internals import BatchNorm, RunningNorm, own_buffers, version_of
from kdist_trainer.world import to_local


class _Slot(NamedTuple):
    """Where a module keeps a buffer: the tensor in it may be replaced."""

    owner: nn.Module
    key: str
    name: str
    """Full name in the model."""

    @property
    def tensor(self) -> Tensor | None:
        return own_buffers(self.owner)[self.key]


class _FlatBuffers(NamedTuple):
    """Buffers of all types on one device, and a copy of their bytes in one tensor."""

    slots: list[_Slot]
    tensors: list[Tensor]
    """The tensors that were in these slots when the bytes were copied."""
    flat: Tensor
    """The bytes: uint8, shape (sum of the tensors' bytes,)."""

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the bytes back into the tensors."""
        sizes = [to_local(tensor).nbytes for tensor in self.tensors]
        for tensor, part in zip(self.tensors, torch.split(self.flat, sizes), strict=True):
            own = to_local(tensor)
            own.copy_(part.view(own.dtype).view(own.shape))


class Buffers:
    """The buffers of one rank's module, and the ranks that hold the same ones."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        keep_previous: bool = False,
    ) -> None:
        """Synchronize nothing yet.

        Args:
            module: The model as the workload built it.
            group: The ranks that hold the same part of each model replica, the first replica's
                first; None for a single process.
            keep_previous: Whether a step may be skipped or given up, so that the buffers of the
                step before must be kept.
        """
        self._module = module
        self._group = group if group is not None and group.size() > 1 else None
        self._source = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        self._changing: set[str] = set()
        """Names of the buffers that training was seen to change."""
        self._synchronized: list[_Slot] = []
        self._keep_previous = keep_previous
        self._previous: list[_FlatBuffers] = []
        """The values after the last finished step."""
        self._latest: list[_FlatBuffers] | None = None
        """The values of the step in progress, once they are synchronized."""
        self._constants: list[tuple[_Slot, int, int]] = []
        """All other buffers, each with its tensor's identity and version."""
        self._modes: list[tuple[nn.Module, bool]] = []
        """Modes of the batch norms from before `use_running_stats`."""
        self._norms = [
            one
            for one in module.modules()
            if isinstance(one, BatchNorm) and not isinstance(one, SyncBatchNorm)
        ]

    @contextmanager
    def detect_changes(self, *, sends_values: bool = True) -> Iterator[None]:
        """Observe which buffers change in training passes within the `with` block. Collective.

        Afterwards they have their values from before.

        Args:
            sends_values: Whether all ranks take over the values of the first replica then.
        """
        before = [(slot, slot.tensor, _copy(slot.tensor)) for slot in self._slots()]
        try:
            yield
        finally:
            changed = {
                slot.name
                for slot, tensor, copy in before
                if not _is_same(slot.tensor, tensor, copy)
            }
            with torch.no_grad():
                for slot, tensor, copy in before:
                    own_buffers(slot.owner)[slot.key] = tensor
                    if tensor is not None and copy is not None:
                        tensor.copy_(copy)
        if sends_values:
            self._broadcast(self._slots())
        self._select(self._union_over_ranks(changed))

    def track_constants(self) -> None:
        """Take the present values of all other buffers as constants: the model was restored."""
        self._select(set())

    def synchronize(self) -> bool:
        """Give every rank the first replica's buffers; returns whether anything was sent.
        Collective: all ranks of the group or none.
        """
        if not self._synchronized or (self._group is None and not self._keep_previous):
            return False
        self._latest = self._broadcast(self._synchronized)
        return self._group is not None

    def accept(self) -> None:
        """Make the synchronized values those of the finished step."""
        if self._latest is not None:
            self._previous, self._latest = self._latest, None

    def restore(self) -> None:
        """Restore the values of the last finished step. The present one is skipped, and a NaN of
        its samples would stay in a running mean; or it is given up since another rank has failed.
        """
        self._latest = None
        for buffers in self._previous:
            for slot, tensor in zip(buffers.slots, buffers.tensors, strict=True):
                own_buffers(slot.owner)[slot.key] = tensor
            buffers.restore()

    def synchronize_late(self) -> None:
        """Synchronize buffers that seemed constant until now, before the model is saved or
        evaluated. Collective.
        """
        if self._group is None:
            return
        late = {
            slot.name
            for slot, identity, version in self._constants
            if _identity(slot.tensor) != (identity, version)
        }
        if found := self._union_over_ranks(late):
            log.warn(
                "buffers-late",
                message=f"{len(found)} buffers of the model ({min(found)}) changed for the first "
                "time after the warm-up: ranks "
                "synchronize them from now on, before that each had its own",
            )
            self._select(found)
            self.synchronize()
            self.accept()

    @contextmanager
    def running_stats(self) -> Iterator[None]:
        """Within the `with` block, batch norms use their running statistics: one sample has no
        variance, and none has no mean.
        """
        self.use_running_stats(True)
        try:
            yield
        finally:
            self.use_running_stats(False)

    def use_running_stats(self, on: bool) -> None:
        """Set whether batch norms use their running statistics."""
        if on and not self._modes:
            self._modes = [(norm, norm.training) for norm in self._norms]
            for norm in self._norms:
                norm.training = False
        elif not on:
            for module, mode in self._modes:
                module.training = mode
            self._modes = []

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: which buffers change, even if the next warm-up does not show
        it. Their values belong to the model.
        """
        return {"known": sorted(self._changing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`, the same on every rank."""
        self._select(set(state["known"]))

    def unsaved(self, known: Collection[str]) -> dict[str, Tensor]:
        """The buffers among `known`, names of those that change, that no state dict has."""
        saved = set(self._module.state_dict())
        return {
            slot.name: slot.tensor.detach()
            for slot in self._slots()
            if slot.name in known and slot.name not in saved and slot.tensor is not None
        }

    @torch.no_grad()
    def load_unsaved(self, values: Mapping[str, Tensor]) -> None:
        """Take over the values of `unsaved`, those of another rank."""
        for slot in self._slots():
            value = values.get(slot.name)
            if value is None:
                continue
            own = slot.tensor
            if own is not None and (own.shape, own.dtype) == (value.shape, value.dtype):
                own.copy_(value)
            else:
                own_buffers(slot.owner)[slot.key] = value

    def _slots(self) -> list[_Slot]:
        slots: dict[int, _Slot] = {}
        for path, owner in self._module.named_modules():
            for key, tensor in own_buffers(owner).items():
                slots.setdefault(
                    id(owner if tensor is None else tensor),
                    _Slot(owner, key, f"{path}.{key}".lstrip(".")),
                )
        return list(slots.values())

    def _select(self, changing: set[str]) -> None:
        """Synchronize these buffers too, and the running statistics of norms, which a user may
        freeze and unfreeze later.
        """
        self._changing |= changing
        self._synchronized = [
            slot
            for slot in self._slots()
            if slot.name in self._changing or isinstance(slot.owner, RunningNorm)
        ]
        self._previous = _flatten(self._synchronized) if self._keep_previous else []
        self._latest = None
        names = {slot.name for slot in self._synchronized}
        self._constants = [
            (slot, *_identity(slot.tensor)) for slot in self._slots() if slot.name not in names
        ]

    def _union_over_ranks(self, names: set[str]) -> set[str]:
        """The names of all ranks, including those that hold other parts of the model, since one
        rank saves them for all.
        """
        if self._group is None:
            return names
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, names)
        return set().union(*every)

    def _broadcast(self, slots: Sequence[_Slot]) -> list[_FlatBuffers]:
        """Send the buffers in one broadcast per device; returns their values, if they are kept."""
        if self._group is None and not self._keep_previous:
            return []
        parts = _flatten(slots)
        for part in parts if self._group is not None else ():
            dist.broadcast(part.flat, src=self._source, group=self._group)
            if dist.get_rank() != self._source:
                part.restore()
        return parts if self._keep_previous else []


def _flatten(slots: Sequence[_Slot]) -> list[_FlatBuffers]:
    """Copy the bytes of buffers into one tensor per device, the widest types first, so that every
    part is aligned.
    """
    devices: dict[torch.device, list[tuple[_Slot, Tensor]]] = {}
    for slot in slots:
        tensor = slot.tensor
        if tensor is not None and to_local(tensor).numel():
            devices.setdefault(tensor.device, []).append((slot, tensor))
    buffers = []
    for pairs in devices.values():
        pairs.sort(key=lambda pair: -pair[1].element_size())
        flat = torch.cat([to_local(tensor).reshape(-1).view(torch.uint8) for _, tensor in pairs])
        buffers.append(
            _FlatBuffers([slot for slot, _ in pairs], [tensor for _, tensor in pairs], flat)
        )
    return buffers


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _is_same(now: Tensor | None, before: Tensor | None, copy: Tensor | None) -> bool:
    """Whether a buffer still is the tensor that it was, with the values of `copy`."""
    if now is None or before is None or copy is None:
        return now is before
    return now is before and torch.equal(to_local(now), to_local(copy))


def _identity(tensor: Tensor | None) -> tuple[int, int]:
    """Which tensor it is, and a number that every in-place operation increments."""
    return (id(tensor), 0 if tensor is None else version_of(tensor))
