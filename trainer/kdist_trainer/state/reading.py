"""Reads the state of modules and optimizers, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from kdist_trainer.errors import ConfigError
from kdist_trainer.state.names import Names, Naming, parameter_names

OWN: Final = "(optimizer):"
"""Comes before the keys of an optimizer's state that are texts, and no parameters."""


def read_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of a module and its optimizer: {"model": ..., "optimizer": ...}. Tensors are those
    in use, not copies.

    Raises:
        ConfigError: See `read_optimizer`.
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

    Args:
        optimizer: The optimizer.
        names: The names of all parameters that it has.

    Raises:
        ConfigError: If it has a parameter without a name.
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
