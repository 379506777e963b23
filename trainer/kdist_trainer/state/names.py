"""The names of what a module holds, without what wrappers add to them. Also finds tensors whose
elements share memory, such as expanded ones, into which nothing can be copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from kdist_trainer.torch_internals import own_buffers, unsaved_buffers

Names = Mapping[Tensor, str]
"""The name of each parameter."""

_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")
"""How `torch.compile` and activation checkpointing call the module that they wrap."""
_MODULE = "module"
"""How DDP calls it: users call modules so too."""


class Naming:
    """Finds the names that a module had before it, or parts of it, were wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self._prefixes: Sequence[str] = [
            f"{path}.".lstrip(".")
            for path, one in module.named_modules()
            if isinstance(one, DistributedDataParallel | DataParallel)
        ]

    def plain(self, name: str) -> str:
        for prefix in reversed(self._prefixes):
            rest = name.removeprefix(prefix)
            if rest != name or not prefix:
                first, _, inner = rest.partition(".")
                name = f"{prefix}{inner}" if first == _MODULE else name
        return unwrapped(name)


def unwrapped(name: str) -> str:
    """A name without what `torch.compile` and activation checkpointing add."""
    if not any(part in name for part in _PARTS):
        return name
    return ".".join(part for part in name.split(".") if part not in _PARTS)


def parameter_names(modules: nn.Module | Mapping[str, nn.Module]) -> dict[Tensor, str]:
    """The name of each parameter; one that is tied has its first name. Those of several modules
    begin with that of the module: `generator.fc.weight`.
    """
    if not isinstance(modules, nn.Module):
        names: dict[Tensor, str] = {}
        for key, module in modules.items():
            for parameter, name in parameter_names(module).items():
                names.setdefault(parameter, f"{key}.{name}")
        return names
    naming = Naming(modules)
    return {one: naming.plain(name) for name, one in modules.named_parameters()}


class BufferNames(NamedTuple):
    """How the buffers of a saved state differ from a new module's, by their names."""

    absent: Collection[str] = ()
    """Those that are to be None."""
    made: Collection[str] = ()
    """Those that training has made: a new module has them in another shape or not at all."""


AS_NEW: Final = BufferNames()


class BufferSlot(NamedTuple):
    """Where a module keeps a buffer: the tensor in it may be replaced."""

    owner: nn.Module
    key: str
    name: str
    """Full name in the model."""

    @property
    def tensor(self) -> Tensor | None:
        return own_buffers(self.owner)[self.key]

    @property
    def is_saved(self) -> bool:
        return self.key not in unsaved_buffers(self.owner)


def buffer_slots(module: nn.Module) -> Iterator[BufferSlot]:
    """The slots of all buffers, those that are None too."""
    naming = Naming(module)
    for path, owner in module.named_modules():
        for key in own_buffers(owner):
            yield BufferSlot(owner, key, naming.plain(f"{path}.{key}".lstrip(".")))


def absent_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that are None, and would be saved otherwise."""
    return [one.name for one in buffer_slots(module) if one.is_saved and one.tensor is None]


def overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory."""
    return tensor.layout is torch.strided and any(
        step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    )


@torch.no_grad()
def separate(module: nn.Module) -> None:
    """Give every element of a module's parameters and buffers memory of its own."""
    for parameter in module.parameters():
        if overlaps(parameter):
            parameter.data = parameter.data.clone()
    for slot in buffer_slots(module):
        if slot.tensor is not None and overlaps(slot.tensor):
            own_buffers(slot.owner)[slot.key] = slot.tensor.clone()
