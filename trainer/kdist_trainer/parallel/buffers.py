"""A model's buffers: state such as running means, which no optimizer moves and each rank computes
from its own samples.

After every step they are those of the first copy of the model on all ranks, so that a checkpoint,
an evaluation and the digest of a run see one model. Buffers that training leaves alone, such as
masks, are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase

from kdist_trainer import log
from kdist_trainer.world import to_local


class _Slot(NamedTuple):
    """Where a module keeps a buffer: the tensor in it may be replaced."""

    owner: nn.Module
    key: str
    name: str
    """By which the whole model knows it."""

    @property
    def tensor(self) -> Tensor | None:
        return self.owner._buffers[self.key]


class _Together(NamedTuple):
    """Buffers of all types on one device, with their bytes side by side."""

    slots: list[_Slot]
    tensors: list[Tensor]
    """What was in these slots: the tensor may be replaced, and belongs there again when the bytes
    do.
    """
    flat: Tensor

    @torch.no_grad()
    def put_back(self) -> None:
        """Have the tensors be what the bytes say."""
        for tensor, part in zip(
            self.tensors,
            torch.split(self.flat, [to_local(one).nbytes for one in self.tensors]),
            strict=True,
        ):
            own = to_local(tensor)
            own.copy_(part.view(own.dtype).view(own.shape))


class Buffers:
    """The buffers of one rank's module, and the ranks that hold the same ones."""

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup | None, *, keep: bool = False
    ) -> None:
        """`group`: the ranks of the same place in each copy of the model, the first copy first;
        None for a rank alone.

        `keep`: a step may be left out, so that those of the step before are wanted again.
        """
        self._module = module
        self._group = group if group is not None and group.size() > 1 else None
        self._source = (
            dist.get_global_rank(group, 0) if self._group is not None and group is not None else 0
        )
        self._known: set[str] = set()
        """Names of those that training was seen to change."""
        self._sent: list[_Slot] = []
        self._keep = keep
        self._before: list[_Together] = []
        """What was agreed on last."""
        self._kept: list[tuple[_Slot, int, int]] = []
        """The others, each with its tensor's identity and version: constants, as far as is
        known.
        """
        self._modes: list[tuple[nn.Module, bool]] = []
        """Those of the norms, while they are at rest."""
        self._norms = [
            one
            for one in module.modules()
            if isinstance(one, _BatchNorm) and not isinstance(one, SyncBatchNorm)
        ]

    @contextmanager
    def observed(self) -> Iterator[None]:
        """A block that trains on nothing that counts: it shows which buffers change. Collective.

        They are left as they were before, on all ranks as on the first copy's.
        """
        before = [(slot, slot.tensor, _copy(slot.tensor)) for slot in self._slots()]
        yield
        changed = {
            slot.name for slot, tensor, copy in before if not _same(slot.tensor, tensor, copy)
        }
        with torch.no_grad():
            for slot, tensor, copy in before:
                slot.owner._buffers[slot.key] = tensor
                if tensor is not None and copy is not None:
                    tensor.copy_(copy)
        self._agree_on(self._slots())
        self._choose(self._together(changed))

    def begin(self) -> None:
        """Take what the constants are now for what they stay: the model was restored."""
        self._choose(set())

    def agree(self) -> bool:
        """Give every rank the first copy's; whether anything was sent. Collective: all ranks of the
        group or none.
        """
        if not self._sent or (self._group is None and not self._keep):
            return False
        self._before = self._agree_on(self._sent)
        return self._group is not None

    def put_back(self) -> None:
        """Have what all ranks agreed on after the step before: this one is left out, and a NaN in
        it would stay in a mean.
        """
        for together in self._before:
            for slot, tensor in zip(together.slots, together.tensors, strict=True):
                slot.owner._buffers[slot.key] = tensor
            together.put_back()

    def agree_on_late(self) -> None:
        """Before the model is saved or measured: agree on buffers that seemed constant until now.
        Collective.
        """
        if self._group is None:
            return
        late = {
            slot.name
            for slot, identity, version in self._kept
            if _trace(slot.tensor) != (identity, version)
        }
        if found := self._together(late):
            log.warn(
                "buffers-late",
                message=f"{len(found)} buffers of the model ({min(found)}) changed for the first "
                "time after the warm-up: ranks "
                "agree on them from now on, before that each had its own",
            )
            self._choose(found)
            self.agree()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A block in which batch norms go by their running statistics: one sample has no variance,
        and none has no mean.
        """
        self.rest(True)
        try:
            yield
        finally:
            self.rest(False)

    def rest(self, on: bool) -> None:
        """Begin or end such a block."""
        if on and not self._modes:
            self._modes = [(norm, norm.training) for norm in self._norms]
            for norm in self._norms:
                norm.training = False
        elif not on:
            for one, mode in self._modes:
                one.training = mode
            self._modes = []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the buffers: which ones change, also if the next
        warm-up does not show it.
        """
        return {"known": sorted(self._known)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, on every rank the same."""
        self._choose(set(state["known"]))

    def _slots(self) -> list[_Slot]:
        seen: dict[int, _Slot] = {}
        for path, owner in self._module.named_modules():
            for key, tensor in owner._buffers.items():
                seen.setdefault(
                    id(owner if tensor is None else tensor),
                    _Slot(owner, key, f"{path}.{key}".lstrip(".")),
                )
        return list(seen.values())

    def _choose(self, changed: set[str]) -> None:
        """Send those that change, and the running statistics of norms, which a user may freeze and
        let go later.
        """
        self._known |= changed
        sent = [
            slot
            for slot in self._slots()
            if slot.name in self._known or isinstance(slot.owner, _NormBase)
        ]
        names = {slot.name for slot in sent}
        self._sent, self._before = sent, _lay_together(sent) if self._keep else []
        self._kept = [
            (slot, *_trace(slot.tensor)) for slot in self._slots() if slot.name not in names
        ]

    def _together(self, names: set[str]) -> set[str]:
        """The names of all ranks, also of those that hold other parts of the model: one of them
        writes them down for all.
        """
        if self._group is None:
            return names
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, names)
        return set().union(*parts)

    def _agree_on(self, slots: Sequence[_Slot]) -> list[_Together]:
        """Send them, with one broadcast for those on a device; what they are then, where that is
        kept.
        """
        if self._group is None and not self._keep:
            return []
        parts = _lay_together(slots)
        for part in parts if self._group is not None else ():
            dist.broadcast(part.flat, src=self._source, group=self._group)
            if dist.get_rank() != self._source:
                part.put_back()
        return parts if self._keep else []


def _lay_together(slots: Sequence[_Slot]) -> list[_Together]:
    """One for each device; the widest types first, so that each part of the bytes is aligned."""
    devices: dict[torch.device, list[tuple[_Slot, Tensor]]] = {}
    for slot in slots:
        tensor = slot.tensor
        if tensor is not None and to_local(tensor).numel():
            devices.setdefault(tensor.device, []).append((slot, tensor))
    together = []
    for same in devices.values():
        same.sort(key=lambda one: -one[1].element_size())
        flat = torch.cat([to_local(tensor).reshape(-1).view(torch.uint8) for _, tensor in same])
        together.append(_Together([slot for slot, _ in same], [tensor for _, tensor in same], flat))
    return together


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _same(now: Tensor | None, before: Tensor | None, copy: Tensor | None) -> bool:
    """Whether a buffer still is the tensor that it was, with what was in it."""
    if now is None or before is None or copy is None:
        return now is before
    return now is before and torch.equal(to_local(now), to_local(copy))


def _trace(tensor: Tensor | None) -> tuple[int, int]:
    return (id(tensor), 0 if tensor is None else tensor._version)
