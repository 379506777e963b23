"""Keeps one model on all ranks, and a copy of what a skipped step must not change: buffers such as
running means, and all else that a forward pass changes and no optimizer does, such as the frozen
weights of a mean teacher, or extra state.

What changes is found by value, after each pass of the warm-up. After every step all ranks take over
the buffers of the first model replica, and what else differs between ranks, so that a checkpoint,
an evaluation and the hash of the weights see one model. A copy from after the last finished step is
put back where a step is skipped or abandoned. What seems constant is not sent and not copied: a
digest of it is compared before it counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import SyncBatchNorm
from torch.optim import Optimizer

from kdist_trainer import log
from kdist_trainer.distributed.world import to_local
from kdist_trainer.state import (
    BufferSlot,
    ValueKind,
    absent_buffers,
    buffer_slots,
    digest_of,
    kind_of,
    read_module,
)
from kdist_trainer.state.names import Naming
from kdist_trainer.torch_internals import BatchNorm, RunningNorm, own_buffers

_NOTHING = digest_of(None)


class ParameterSlot(NamedTuple):
    """A parameter: what it refers to may be replaced, it stays."""

    parameter: nn.Parameter
    name: str

    @property
    def tensor(self) -> Tensor:
        return self.parameter


TensorSlot = BufferSlot | ParameterSlot


class ExtraSlot(NamedTuple):
    """A module with extra state."""

    owner: nn.Module
    name: str

    def read(self) -> Any:
        return copy.deepcopy(self.owner.get_extra_state())

    def write(self, value: Any) -> None:
        self.owner.set_extra_state(copy.deepcopy(value))


def tensor_slots(module: nn.Module, *, with_parameters: bool) -> list[TensorSlot]:
    """The slots of all buffers, each buffer once, and of the parameters if asked for."""
    slots: dict[object, TensorSlot] = {}
    for one in buffer_slots(module):
        slots.setdefault(_place(one) if one.tensor is None else id(one.tensor), one)
    found = list(slots.values())
    if with_parameters:
        naming = Naming(module)
        found += [ParameterSlot(one, naming.plain(name)) for name, one in module.named_parameters()]
    return found


def extra_slots(module: nn.Module) -> list[ExtraSlot]:
    """The modules that have extra state."""
    naming = Naming(module)
    return [
        ExtraSlot(one, naming.plain(f"{path}._extra_state".lstrip(".")))
        for path, one in module.named_modules()
        if type(one).get_extra_state is not nn.Module.get_extra_state
    ]


class FlatCopy(NamedTuple):
    """Tensors of all types on one device, and a copy of their bytes in one tensor."""

    slots: list[TensorSlot]
    tensors: list[Tensor]
    """The tensors that were in these slots when the bytes were copied."""
    layouts: list[tuple[torch.Size, torch.dtype]]
    flat: Tensor
    """The bytes: uint8, shape (sum of the tensors' bytes,)."""

    @torch.no_grad()
    def restore(self) -> None:
        """Put the tensors back into their slots, with these bytes."""
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self.layouts]
        parts = torch.split(self.flat, sizes)
        for slot, tensor, (shape, dtype), part in zip(
            self.slots, self.tensors, self.layouts, parts, strict=True
        ):
            _put_back(slot, tensor, part.view(dtype).view(shape))


def flatten(slots: Sequence[TensorSlot]) -> list[FlatCopy]:
    """Copy the bytes of tensors into one tensor per device, the widest types first, so that every
    part is aligned.
    """
    devices: dict[torch.device, list[tuple[TensorSlot, Tensor]]] = {}
    for slot in slots:
        tensor = slot.tensor
        if tensor is not None and to_local(tensor).numel():
            devices.setdefault(tensor.device, []).append((slot, tensor))
    copies = []
    for pairs in devices.values():
        pairs.sort(key=lambda pair: -pair[1].element_size())
        own = [to_local(tensor) for _, tensor in pairs]
        flat = torch.cat([one.reshape(-1).view(torch.uint8) for one in own])
        layouts = [(one.shape, one.dtype) for one in own]
        copies.append(
            FlatCopy([slot for slot, _ in pairs], [tensor for _, tensor in pairs], layouts, flat)
        )
    return copies


class Snapshot:
    """A copy of everything that a forward pass may change, on the CPU."""

    def __init__(self, module: nn.Module, *, with_parameters: bool) -> None:
        self._module = module
        slots = tensor_slots(module, with_parameters=with_parameters)
        self._tensors = [(slot, slot.tensor, _copy(slot.tensor)) for slot in slots]
        self._extras = [(one, one.read()) for one in extra_slots(module)]
        self._places = {_place(one) for one in buffer_slots(module)}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore values, buffers that were None or not there, and extra state."""
        for new in [one for one in buffer_slots(self._module) if _place(one) not in self._places]:
            del own_buffers(new.owner)[new.key]
        for slot, tensor, saved in self._tensors:
            if tensor is not None and saved is not None:
                _put_back(slot, tensor, saved)
            elif isinstance(slot, BufferSlot):
                own_buffers(slot.owner)[slot.key] = tensor
        for extra, value in self._extras:
            extra.write(value)


def _place(slot: BufferSlot) -> tuple[int, str]:
    return id(slot.owner), slot.key


def _put_back(slot: TensorSlot, tensor: Tensor, saved: Tensor) -> None:
    """Put a tensor back into its slot, with the saved value of this rank's part."""
    own = to_local(tensor)
    if (own.shape, own.dtype) == (saved.shape, saved.dtype) and not own.is_inference():
        own.copy_(saved)
    elif isinstance(slot, ParameterSlot):
        slot.parameter.data = saved.to(own.device, copy=True)
    else:
        tensor = saved.to(own.device, copy=True)
    if isinstance(slot, BufferSlot):
        own_buffers(slot.owner)[slot.key] = tensor


def _copy(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.is_meta:
        return None
    return to_local(tensor).to("cpu", copy=True)


def find_changed(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """Names whose digests differ, or which are only in one of the two."""
    return {
        name
        for name in before.keys() | now.keys()
        if before.get(name, _NOTHING) != now.get(name, _NOTHING)
    }


class NormModes:
    """The modes of a model's batch norms."""

    def __init__(self, module: nn.Module) -> None:
        self._modes: list[tuple[nn.Module, bool]] = []
        """Modes from before `use_running_stats`."""
        self._norms = [
            one
            for one in module.modules()
            if isinstance(one, BatchNorm) and not isinstance(one, SyncBatchNorm)
        ]

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
        if on and not self._modes:
            self._modes = [(norm, norm.training) for norm in self._norms]
            for norm in self._norms:
                norm.training = False
        elif not on:
            for module, mode in self._modes:
                module.training = mode
            self._modes = []


LATE: Final = "changed for the first time after the warm-up"


def name_values(names: Collection[str]) -> str:
    """How many values of the model these are, and one of them."""
    return f"{len(names)} values of the model ({min(names)})"


class Buffers:
    """What training changes besides the optimizer's weights, and the ranks that hold the same."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        keep_previous: bool = False,
        with_parameters: bool = False,
    ) -> None:
        """Synchronize nothing yet; `group` is as in `Strategy.replica_group`. `keep_previous` says
        whether a step may be skipped or abandoned, so that the values of the step before must be
        kept; `with_parameters`, whether parameters are observed too: each rank holds them whole.
        """
        self._module = module
        self._group = group if group is not None and group.size() > 1 else None
        self._source = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        self._keep_previous = keep_previous
        self._with_parameters = with_parameters
        self._is_on_cpu = all(one.device.type == "cpu" for one in module.parameters())
        self._owned: set[Tensor] = set()
        """The parameters that the optimizer changes."""
        self._first: dict[str, ValueKind] = self._saved_kinds()
        """The buffers of a new model."""
        self._made: set[str] = set()
        self._changing: set[str] = set()
        """Names of what training was seen to change."""
        self._differing: set[str] = set()
        """Those among them, besides buffers, that differ between ranks."""
        self._synchronized: list[TensorSlot] = []
        self._kept: list[TensorSlot] = []
        """Changes in the same way on every rank: it is copied, but not sent."""
        self._extras: list[ExtraSlot] = []
        self._split: set[str] = set()
        """Names of what not all ranks have, or in different kinds: each keeps its own."""
        self._awaited: set[str] = set()
        """Names of buffers that change, and are not there yet."""
        self._new: set[str] = set()
        """Names of those that the step in progress has made."""
        self._previous: list[FlatCopy] = []
        """The values after the last finished step."""
        self._previous_kept: list[FlatCopy] = []
        self._previous_extras: list[tuple[ExtraSlot, Any]] = []
        self._latest: list[FlatCopy] | None = None
        """The values of the step in progress, once they are synchronized."""
        self._constants: dict[str, str] = {}
        """Digests of all else."""
        self.norms = NormModes(module)

    def exclude(self, optimizer: Optimizer) -> None:
        """Exclude the parameters that the optimizer changes."""
        self._owned = {one for group in optimizer.param_groups for one in group["params"]}

    @contextmanager
    def detect_changes(self, *, sends_values: bool = True) -> Iterator[Callable[[], None]]:
        """Observe what changes in training passes within the `with` block. Collective.

        Afterwards all is as it was before. The function that is yielded compares the values; it is
        to be called after each pass, since what one pass changes the next one may change back.
        With `sends_values` all ranks then take over the buffers of the first replica.
        """
        snapshot = Snapshot(self._module, with_parameters=self._with_parameters)
        changed: set[str] = set()
        last = self._digests(trained=self._is_on_cpu)

        def compare() -> None:
            nonlocal last
            now = self._digests(trained=self._is_on_cpu)
            changed.update(find_changed(last, now))
            last = now

        try:
            yield compare
        finally:
            compare()
            snapshot.restore()
        if sends_values:
            self._broadcast(self._buffers())
        changed = set[str]().union(*self._gather(changed))
        self._differing |= self._find_differing(changed, last)
        self._select(changed)

    def track_constants(self) -> None:
        """Take everything else as constant from now on: the model was restored."""
        self._select(set())
        self._constants = self._digests(besides=self._changing)

    def synchronize(self) -> bool:
        """Give every rank the first replica's values; returns whether anything was sent.
        Collective: all ranks of the group or none.
        """
        if self._awaited:
            self._await()
        if self._differing and self._extras and self._group is not None:
            # every rank gets the first replica's extra state
            differing = [one for one in self._extras if one.name in self._differing]
            values = [[one.read() for one in differing]]
            dist.broadcast_object_list(values, src=self._source, group=self._group)
            if dist.get_rank() != self._source:
                for one, value in zip(differing, values[0], strict=True):
                    one.write(value)
        if not self._synchronized or (self._group is None and not self._keep_previous):
            return False
        self._latest = self._broadcast(self._synchronized)
        return self._group is not None

    def accept(self) -> None:
        """Record the present values as those of the finished step."""
        if self._latest is not None:
            self._previous, self._latest = self._latest, None
            self._new = set()
        if self._keep_previous and (self._kept or self._extras):
            self._keep()

    def restore(self) -> None:
        """Restore the values of the last finished step. The present one is skipped, and a NaN of
        its samples would stay in a running mean; or it is abandoned since another rank has failed.
        """
        self._latest = None
        for name in self._awaited | self._new:  # which the abandoned step has made
            for slot in self._buffers():
                if slot.name == name and slot.tensor is not None:
                    if name in self._first:
                        own_buffers(slot.owner)[slot.key] = None
                    else:
                        del own_buffers(slot.owner)[slot.key]
        for copied in (*self._previous, *self._previous_kept):
            copied.restore()
        for extra, value in self._previous_extras:
            extra.write(value)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore what changes when the `with` block ends: an evaluation leaves no trace."""
        copies = flatten([*self._synchronized, *self._kept])
        extras = [(one, one.read()) for one in self._extras]
        try:
            yield
        finally:
            for copied in copies:
                copied.restore()
            for extra, value in extras:
                extra.write(value)

    def find_moved(self) -> list[str]:
        """Names of what seemed constant and has changed since the constants were taken."""
        now = self._digests(besides=self._changing)
        before = {name: one for name, one in self._constants.items() if name not in self._changing}
        return sorted(find_changed(before, now))

    def synchronize_late(self) -> None:
        """Find what seemed constant until now and has changed, and what ranks hold in different
        ways; from now on it is kept too. Before the model is saved or evaluated. Collective.
        """
        if self._group is None and not self._keep_previous:
            return
        found = set[str]().union(*self._gather(self.find_moved()))
        alike = found | {one.name for one in (*self._kept, *self._extras)} - self._differing
        if not alike:
            return
        differing = self._find_differing(alike, self._digests())
        if found or differing:
            what = name_values(found | differing)
            before = ", before that each had its own" if differing else ""
            log.warn(
                "buffers-late",
                message=f"{what} {LATE}: ranks synchronize them from now on{before}",
            )
            if differing and dist.get_rank() == 0:
                log.not_reproducible(
                    f"{what} were different on the ranks until they were synchronized"
                )
        kinds = self._gather({one.name: kind_of(one.tensor) for one in self._slots()})
        self._split |= {
            name for name in found if any(one.get(name) != kinds[0].get(name) for one in kinds)
        }
        self._differing |= differing
        self._select(found)
        self._constants = self._digests(besides=self._changing)
        self.synchronize()
        self.accept()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`, the same on every rank."""
        self._made |= set(state.get("made", ()))
        self._differing |= set(state.get("differing", ()))
        self._select(set(state["known"]))

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: what changes, even if the next warm-up does not show it, and
        how the buffers differ from a new model's. Their values belong to the model.
        """
        return {
            "known": sorted(self._changing),
            "differing": sorted(self._differing),
            "absent": absent_buffers(self._module),
            "made": sorted(self.made()),
        }

    def made(self) -> set[str]:
        """Names of the saved buffers that training has made, or made in another shape."""
        now = self._saved_kinds()
        return self._made | {
            name
            for name, kind in now.items()
            if self._first.get(name, ValueKind("NoneType")) != kind
        }

    def unsaved(self) -> dict[str, Tensor]:
        saved = read_module(self._module)
        return {
            slot.name: slot.tensor.detach()
            for slot in self._buffers()
            if slot.name not in saved and slot.tensor is not None
        }

    def remove_made(self, saved: Collection[str]) -> set[str]:
        """Remove the buffers that training has made and a saved state lacks; returns the names of
        all that it has made.
        """
        made = self.made()
        for slot in self._buffers():
            if slot.name in made - set(saved):
                del own_buffers(slot.owner)[slot.key]
        return made

    def moving_unsaved(self) -> list[str]:
        """Names of the buffers that change, and that no checkpoint has."""
        return sorted(self._changing & self.unsaved().keys())

    @torch.no_grad()
    def load_unsaved(self, values: Mapping[str, Tensor]) -> None:
        """Take over what `unsaved` has returned on another rank."""
        saved = read_module(self._module)
        for slot in self._buffers():
            value, own = values.get(slot.name), slot.tensor
            if slot.name in saved or value is own:
                continue
            if own is not None and value is not None and kind_of(own) == kind_of(value):
                own.copy_(value)
            else:
                own_buffers(slot.owner)[slot.key] = value

    def _saved_kinds(self) -> dict[str, ValueKind]:
        return {slot.name: kind_of(slot.tensor) for slot in self._buffers() if slot.is_saved}

    def _buffers(self) -> list[BufferSlot]:
        slots = tensor_slots(self._module, with_parameters=False)
        return [slot for slot in slots if isinstance(slot, BufferSlot)]

    def _slots(self) -> list[TensorSlot]:
        return tensor_slots(self._module, with_parameters=self._with_parameters)

    def _digests(self, *, besides: Collection[str] = (), trained: bool = False) -> dict[str, str]:
        """The digests of all values but those that are named, and those that the optimizer changes
        unless `trained`.
        """
        found = {
            slot.name: digest_of(slot.tensor)
            for slot in self._slots()
            if slot.name not in besides
            and (trained or slot.tensor not in self._owned)
            and not (isinstance(slot, BufferSlot) and isinstance(slot.owner, RunningNorm))
        }
        extras = [one for one in extra_slots(self._module) if one.name not in besides]
        return found | {one.name: digest_of(one.owner.get_extra_state()) for one in extras}

    def _find_differing(self, names: set[str], digests: Mapping[str, str]) -> set[str]:
        """Which of these differ between the ranks. Collective."""
        every = self._gather({name: digests.get(name) for name in names})
        return {name for name in names if any(one[name] != every[0][name] for one in every)}

    def _select(self, changing: set[str]) -> None:
        """Keep these values too, and the running statistics of norms, which a user may freeze and
        unfreeze later.
        """
        self._changing |= changing - self._split
        slots = self._slots()
        chosen = [
            slot
            for slot in slots
            if slot.name in self._changing
            or (isinstance(slot, BufferSlot) and isinstance(slot.owner, RunningNorm))
        ]
        self._extras = [one for one in extra_slots(self._module) if one.name in self._changing]
        there = {slot.name for slot in slots if slot.tensor is not None}
        self._awaited = self._changing - there - {one.name for one in self._extras}
        self._synchronized = [slot for slot in chosen if self._is_sent(slot)]
        self._kept = [slot for slot in chosen if not self._is_sent(slot)]
        self._previous = flatten(self._synchronized) if self._keep_previous else []
        self._latest = None
        self._keep()

    def _is_sent(self, slot: TensorSlot) -> bool:
        return isinstance(slot, BufferSlot) or (
            slot.name in self._differing and slot.tensor not in self._owned
        )

    def _keep(self) -> None:
        if self._keep_previous:
            self._previous_kept = flatten(self._kept)
            self._previous_extras = [(one, one.read()) for one in self._extras]

    def _await(self) -> None:
        """Synchronize buffers that change once they are there, in the same kind on every rank.
        Collective.
        """
        there = {
            slot.name: kind_of(slot.tensor)
            for slot in self._buffers()
            if slot.name in self._awaited and slot.tensor is not None
        }
        every = self._gather(there)
        if there and all(one == there for one in every):
            before = self._previous, self._previous_kept, self._previous_extras
            self._select(set())
            # the step is not finished: it may still be abandoned
            self._previous, self._previous_kept, self._previous_extras = before
            self._new |= there.keys()

    def _gather(self, own: Any) -> list[Any]:
        """What all ranks have, including those that hold other parts of the model, since one rank
        saves them for all. Collective.
        """
        if self._group is None:
            return [own]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return every

    def _broadcast(self, slots: Sequence[TensorSlot]) -> list[FlatCopy]:
        """Send the tensors in one broadcast per device; returns their values, if they are kept."""
        if self._group is None and not self._keep_previous:
            return []
        parts = flatten(slots)
        for part in parts if self._group is not None else ():
            dist.broadcast(part.flat, src=self._source, group=self._group)
            if dist.get_rank() != self._source:
                part.restore()
        return parts if self._keep_previous else []
