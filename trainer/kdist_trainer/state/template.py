"""Makes a state that a saved one can be read into, and that is then loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kdist_trainer.state.kinds import Path, ValueKind, flatten, kind_of, put
from kdist_trainer.state.loading import EXTRA, named_parameters
from kdist_trainer.state.names import absent_buffers, parameter_names
from kdist_trainer.state.overlap import overlaps
from kdist_trainer.state.reading import OWN, read_state

_GROUPS: Final = "optimizer.param_groups."
_STATE: Final = "optimizer.state."
_MODEL: Final = "model."


def template(
    module: nn.Module,
    optimizer: Optimizer,
    saved: Mapping[str, ValueKind],
    *,
    absent: Collection[str] = (),
    made: Collection[str] = (),
) -> dict[str, Any]:
    """A state of the saved shape, to be filled with the saved values and loaded by `load_state`.
    Nothing changes.

    Tensors that module and optimizer have in the saved shape are in it themselves. What they lack
    is allocated: optimizer states and buffers that are None. What is no tensor is None until it is
    filled. Where the model differs from what was saved it is in the template as it is, so that a
    comparison by names finds it.

    Args:
        module: The module.
        optimizer: Its optimizer.
        saved: What was saved by flat name; what is neither of the model nor of the optimizer is
            ignored.
        absent: See `load_state`.
        made: See `load_state`.
    """
    own = read_state(module, optimizer)
    parameters = named_parameters(optimizer, parameter_names(module))
    groups = own["optimizer"]["param_groups"]
    present = flatten({"optimizer": {"state": own["optimizer"]["state"]}})
    states: dict[str, Any] = {}
    for flat, kind in saved.items():
        if flat.startswith(_GROUPS):
            number, _, key = flat.removeprefix(_GROUPS).partition(".")
            if number.isdecimal() and int(number) < len(groups) and "." not in key:
                groups[int(number)].setdefault(key, None)
        elif flat.startswith(_STATE):
            path = _path(flat.removeprefix(_STATE), parameters)
            if path:
                value = present[flat][1] if flat in present else None
                if not isinstance(value, Tensor) or kind_of(value) != kind:
                    value = _allocate_state(kind, path, parameters)
                put(states, path, value)
    own["optimizer"]["state"] = states
    own["model"] = _model(module, own["model"], saved, absent, made)
    return own


def _model(
    module: nn.Module,
    own: dict[str, Any],
    saved: Mapping[str, ValueKind],
    absent: Collection[str],
    made: Collection[str],
) -> dict[str, Any]:
    """The module's part: buffers as they were saved, and extra state of the parts that it had."""
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    found = {
        name: torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if isinstance(value, Tensor) and overlaps(value)
        else value
        for name, value in own.items()
        if f"{_MODEL}{name}" in saved or name not in absent
    }
    for name in {*absent_buffers(module), *made}:
        kind = saved.get(f"{_MODEL}{name}")
        if kind is not None and (name not in found or kind_of(found[name]) != kind):
            found[name] = allocate(kind, device)
    for name in [one for one in own if one.rpartition(".")[2] == EXTRA]:
        prefix = f"{_MODEL}{name}"
        parts: dict[str, Any] = {}
        for flat, kind in saved.items():
            if flat == prefix or flat.startswith(f"{prefix}."):
                path = (name, *_keys(flat.removeprefix(prefix).removeprefix(".")))
                put(parts, path, allocate(kind, device))
        found |= parts
    return found


def allocate(kind: ValueKind, device: torch.device) -> Tensor | None:
    """Memory for a tensor of this kind; None for what is no tensor."""
    if kind.shape is None or kind.dtype is None:
        return None
    dtype = getattr(torch, kind.dtype)
    return torch.empty(kind.shape, dtype=dtype, device=device)


def _allocate_state(kind: ValueKind, path: Path, parameters: Mapping[str, Tensor]) -> Any:
    """Memory for a value of an optimizer's state: laid out and placed as the parameter is."""
    parameter = parameters.get(str(path[0]))
    if parameter is None or kind.dtype is None or path[-1] == "step":
        return allocate(kind, torch.device("cpu"))  # torch moves a step to where it is needed
    if kind.shape == list(parameter.shape):
        return torch.empty_like(parameter, dtype=getattr(torch, kind.dtype), requires_grad=False)
    return allocate(kind, parameter.device)


def _path(flat: str, parameters: Collection[str]) -> Path:
    """The name of a parameter and the keys of its state; empty if there is no such parameter."""
    if flat.startswith(OWN):
        return _keys(flat)
    name = flat
    while name and name not in parameters:
        name = name.rpartition(".")[0]
    rest = flat.removeprefix(name).removeprefix(".")
    return (name, *_keys(rest)) if name and rest else ()


def _keys(flat: str) -> Path:
    """The keys of a flat name: what is a number is an index."""
    return tuple(int(one) if one.isdecimal() else one for one in flat.split(".") if one)
