"""What a forward pass may change: the places in a module where tensors and extra state are, and
copies of what is in them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kdist_trainer.state import BufferSlot, buffer_slots, digest_of
from kdist_trainer.state.names import Naming
from kdist_trainer.torch_internals import own_buffers
from kdist_trainer.world import to_local

_NOTHING = digest_of(None)


class ParameterSlot(NamedTuple):
    """A parameter: what it refers to may be replaced, it stays."""

    parameter: nn.Parameter
    name: str

    @property
    def tensor(self) -> Tensor:
        """The parameter."""
        return self.parameter


TensorSlot = BufferSlot | ParameterSlot


class ExtraSlot(NamedTuple):
    """A module with extra state."""

    owner: nn.Module
    name: str

    def read(self) -> Any:
        """A copy of the extra state."""
        return copy.deepcopy(self.owner.get_extra_state())

    def write(self, value: Any) -> None:
        """Set the extra state."""
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
        """Have the module as it was: values, buffers that were None or not there, extra state."""
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
