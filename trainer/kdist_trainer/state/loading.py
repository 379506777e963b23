"""Reads the state of modules and optimizers, makes a template that a saved state is read into,
and loads it: all of it, or nothing with every difference named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kdist_trainer.errors import CheckpointMismatchError, ConfigError
from kdist_trainer.state.kinds import Path, ValueKind, find_differences, flatten, kind_of, put
from kdist_trainer.state.names import (
    AS_NEW,
    BufferNames,
    Names,
    Naming,
    absent_buffers,
    buffer_slots,
    overlaps,
    parameter_names,
    separate,
    unwrapped,
)
from kdist_trainer.torch_internals import own_buffers

OWN: Final = "(optimizer):"
"""Comes before the keys of an optimizer's state that are texts, and no parameters."""


def read_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of a module and its optimizer: {"model": ..., "optimizer": ...}. Tensors are those
    in use, not copies. Raises as `read_optimizer` does.
    """
    return {
        "model": read_module(module),
        "optimizer": read_optimizer(optimizer, parameter_names(module)),
    }


def read_module(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and extra state by their names. A buffer that is None is not in it."""
    naming = Naming(module)
    return {naming.plain(name): value for name, value in module.state_dict().items()}


def read_optimizer(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """The states that exist, by the names of their parameters, and the groups with their numbers.
    Raises `ConfigError` if there is a parameter without a name.
    """
    return {
        "state": {_key(key, names): _plain(value) for key, value in optimizer.state.items()},
        "param_groups": [
            {
                **{key: _plain(value) for key, value in group.items() if key != "params"},
                "params": [name_of(each, names) for each in group["params"]],
            }
            for group in optimizer.param_groups
        ],
    }


def name_of(parameter: Tensor, names: Names) -> str:
    """The name of an optimizer's parameter. Raises `ConfigError` if the model does not have it."""
    if parameter not in names:
        raise ConfigError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of the "
            "model's, so that no checkpoint would hold it: make it a part of the model"
        )
    return names[parameter]


def _key(key: Any, names: Names) -> str:
    return name_of(key, names) if isinstance(key, Tensor) else f"{OWN}{key}"


def _plain(value: Any) -> Any:
    """A value with NumPy's numbers as Python's, of the same bits; dicts and lists are copied, as an
    optimizer changes them.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(one) for one in value)
    return value


EXTRA: Final = "_extra_state"
_MAX_PROBLEMS = 20


class StateMismatchError(CheckpointMismatchError):
    """A state is of another model or optimizer; nothing was loaded. `problems` are the differences,
    each with the path of the value.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        rest = len(self.problems) - _MAX_PROBLEMS
        super().__init__(
            "the state is of another model or optimizer: "
            f"{'; '.join(self.problems[:_MAX_PROBLEMS])}{f'; and {rest} more' if rest > 0 else ''}"
        )


def load_state(
    module: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    *,
    buffers: BufferNames = AS_NEW,
) -> None:
    """Load what `read_state` has returned, all of it. No step is taken. The module may be wrapped
    otherwise, and the optimizer's tensors become its own, without a copy. Raises
    `StateMismatchError` if the state is of another model or optimizer.
    """
    names = parameter_names(module)
    problems = find_module_problems(module, state["model"], buffers=buffers)
    problems += find_optimizer_problems(optimizer, names, state["optimizer"])
    if problems:
        raise StateMismatchError(problems)
    load_module(module, state["model"], buffers=buffers)
    load_optimizer(optimizer, names, state["optimizer"])


def load_module(
    module: nn.Module, values: Mapping[str, Any], *, buffers: BufferNames = AS_NEW
) -> None:
    """Load what `read_module` has returned; see `load_state`."""
    problems = find_module_problems(module, values, buffers=buffers)
    if problems:
        raise StateMismatchError(problems)
    naming = Naming(module)
    values = {unwrapped(name): value for name, value in values.items()}
    # the module gets the buffers that the values have: some become None, some become tensors
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    missing = set(buffers.made)
    for slot in buffer_slots(module):
        missing.discard(slot.name)
        own, value = slot.tensor, values.get(slot.name)
        if value is None and slot.name in buffers.absent and slot.is_saved:
            own_buffers(slot.owner)[slot.key] = None
        elif isinstance(value, Tensor) and (
            own is None or (slot.name in buffers.made and kind_of(own) != kind_of(value))
        ):
            own_buffers(slot.owner)[slot.key] = torch.empty_like(
                value, device=device if own is None else own.device
            )
    named = module.named_modules() if missing else ()
    owners = {naming.plain(f"{path}.x".lstrip(".")): one for path, one in named}
    for name in missing & values.keys():
        path, dot, key = name.rpartition(".")
        if (owner := owners.get(f"{path}{dot}x")) is not None:
            owner.register_buffer(key, torch.empty_like(values[name], device=device))
    separate(module)
    whole = module.state_dict()  # with the versions of the parts: old ones are completed by torch
    for name in whole:
        whole[name] = values[naming.plain(name)]
    module.load_state_dict(whole)


def load_optimizer(optimizer: Optimizer, names: Names, saved: Mapping[str, Any]) -> None:
    """Load what `read_optimizer` has returned: the states as they were saved, for the parameters
    that had one, and all numbers of the groups; see `load_state`.
    """
    problems = find_optimizer_problems(optimizer, names, saved)
    if problems:
        raise StateMismatchError(problems)
    parameters = named_parameters(optimizer, names)
    numbers = {name: number for number, name in enumerate(parameters)}
    groups = [
        {**theirs, "params": [numbers[names[each]] for each in own["params"]]}
        for own, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    states = {unwrapped(name): value for name, value in saved["state"].items()}
    optimizer.load_state_dict(
        {
            "state": {
                numbers[name] if name in numbers else name.removeprefix(OWN): (
                    _shield(value) if name in numbers else value
                )
                for name, value in states.items()
            },
            "param_groups": groups,
        }
    )
    for name, value in states.items():
        if name in parameters and isinstance(value, Mapping):
            _unshield(optimizer.state[parameters[name]], value)


def named_parameters(optimizer: Optimizer, names: Names) -> dict[str, Tensor]:
    """The optimizer's parameters by their names."""
    return {
        name_of(each, names): each for group in optimizer.param_groups for each in group["params"]
    }


def find_module_problems(
    module: nn.Module, values: Mapping[str, Any], *, buffers: BufferNames = AS_NEW
) -> list[str]:
    """Why these values cannot be loaded into a module; empty if they can."""
    own = {name: _kind(name, value) for name, value in read_module(module).items()}
    saved = {unwrapped(name): _kind(name, value) for name, value in values.items()}
    slots = {one.name: one.tensor for one in buffer_slots(module)}
    for name in list(own):
        if name in buffers.absent and name in slots and name not in saved:
            del own[name]  # it will be None
    own |= {
        name: kind
        for name, kind in saved.items()
        # it will be made
        if kind.kind == "tensor"
        and (name in buffers.made or (name in slots and slots[name] is None))
    }
    return [f"model.{problem}" for problem in find_differences(own, saved)]


def find_optimizer_problems(
    optimizer: Optimizer, names: Names, saved: Mapping[str, Any]
) -> list[str]:
    """Why these values cannot be loaded into an optimizer; empty if they can."""
    groups, theirs = optimizer.param_groups, saved["param_groups"]
    if len(groups) != len(theirs):
        return [f"optimizer.param_groups are {len(theirs)} groups instead of {len(groups)}"]
    problems: list[str] = []
    for number, (own, other) in enumerate(zip(groups, theirs, strict=True)):
        path = f"optimizer.param_groups.{number}"
        problems += [f"{path}.{key} is missing" for key in own if key not in other]
        ours = {name_of(each, names) for each in own["params"]}
        given = {unwrapped(name) for name in other.get("params", ())}
        problems += [f"{path}.params: {name} is missing" for name in sorted(ours - given)]
        problems += [f"{path}.params: {name} is not in the model" for name in sorted(given - ours)]
    known = named_parameters(optimizer, names)
    problems += [
        f"optimizer.state.{name} is of no parameter of the optimizer"
        for name in map(unwrapped, saved["state"])
        if name not in known and not name.startswith(OWN)
    ]
    return problems


def _kind(name: str, value: Any) -> ValueKind:
    """What a value of a module is. Extra state may be anything, and change."""
    is_extra = name.rpartition(".")[2] == EXTRA
    return ValueKind("extra state") if is_extra else kind_of(value)


class _Shielded:
    """A value that torch would take apart, or cannot build again: a text, an array, a set."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _shield(value: Any) -> Any:
    """A value for torch's `load_state_dict`, which moves its tensors and must leave the rest."""
    if isinstance(value, Mapping):
        return {key: _shield(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_shield(one) for one in value)
    is_left = isinstance(value, Tensor) or not isinstance(value, Iterable)
    return value if is_left else _Shielded(value)


def _unshield(loaded: Any, saved: Any) -> Any:
    """What torch has loaded, with the values and types that were saved: it gives tensors the type
    of their parameter. What an optimizer's own method has made of them stays.
    """
    if isinstance(loaded, _Shielded):
        return loaded.value
    if isinstance(loaded, Tensor):
        differs = isinstance(saved, Tensor) and saved.dtype != loaded.dtype
        return saved.to(loaded.device) if differs else loaded
    if isinstance(loaded, dict):
        for key, one in loaded.items():
            loaded[key] = _unshield(one, saved.get(key) if isinstance(saved, Mapping) else None)
    elif type(loaded) in (list, tuple):
        alike = type(saved) is type(loaded) and len(saved) == len(loaded)
        others = saved if alike else [None] * len(loaded)
        return type(loaded)(_unshield(*both) for both in zip(loaded, others, strict=True))
    return loaded


_GROUPS: Final = "optimizer.param_groups."
_STATE: Final = "optimizer.state."
_MODEL: Final = "model."


def template(
    module: nn.Module,
    optimizer: Optimizer,
    saved: Mapping[str, ValueKind],
    *,
    buffers: BufferNames = AS_NEW,
) -> dict[str, Any]:
    """A state of the saved shape, to be filled with the saved values and loaded by `load_state`.
    Nothing changes.

    Tensors that module and optimizer have in the saved shape are in it themselves. What they lack
    is allocated: optimizer states and buffers that are None. What is no tensor is None until it is
    filled. Where the model differs from what was saved it is in the template as it is, so that a
    comparison by names finds it. Of what was `saved`, by flat name, only model and optimizer count;
    for `buffers` see `load_state`.
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
    # buffers as they were saved, and extra state of the parts that it had
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    found = {
        name: torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if isinstance(value, Tensor) and overlaps(value)
        else value
        for name, value in own["model"].items()
        if f"{_MODEL}{name}" in saved or name not in buffers.absent
    }
    for name in {*absent_buffers(module), *buffers.made}:
        wanted = saved.get(f"{_MODEL}{name}")
        if wanted is not None and (name not in found or kind_of(found[name]) != wanted):
            found[name] = allocate(wanted, device)
    for name in [one for one in own["model"] if one.rpartition(".")[2] == EXTRA]:
        prefix = f"{_MODEL}{name}"
        parts: dict[str, Any] = {}
        for flat, kind in saved.items():
            if flat == prefix or flat.startswith(f"{prefix}."):
                path = (name, *_keys(flat.removeprefix(prefix).removeprefix(".")))
                put(parts, path, allocate(kind, device))
        found |= parts
    own["model"] = found
    return own


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
