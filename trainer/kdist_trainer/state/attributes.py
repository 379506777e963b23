"""Plain attributes of modules: numbers, texts and tensors that no state has. What a pass changes
there is not kept, so it has to be found and said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kdist_trainer.state.digests import digest_of


class _Attribute(NamedTuple):
    owner: nn.Module
    key: str
    name: str
    """Full name in the model."""


class Attributes:
    """The plain attributes of a model as they are when this is made. Modules with an extra state of
    their own are left out: theirs is kept.
    """

    def __init__(self, module: nn.Module) -> None:
        """Note all values; tensors are copied."""
        self._before: dict[_Attribute, tuple[Any, Any]] = {
            each: (value, _copy(value)) for each, value in _find(module)
        }

    def restore(self) -> list[str]:
        """Put back the values that are others now; returns the full names of these attributes."""
        changed = []
        for (owner, key, name), (value, copy) in self._before.items():
            now = vars(owner).get(key)
            if digest_of(now) == digest_of(copy):
                continue
            changed.append(name)
            if isinstance(value, Tensor) and digest_of(value) != digest_of(copy):
                value.detach().copy_(copy)
            vars(owner)[key] = value
        return changed


def _find(module: nn.Module) -> Iterator[tuple[_Attribute, Any]]:
    for path, owner in module.named_modules():
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            continue
        for key, value in vars(owner).items():
            if isinstance(value, (int, float, str, Tensor)) and key != "training":
                yield _Attribute(owner, key, f"{path or type(owner).__name__}.{key}"), value


def _copy(value: Any) -> Any:
    with torch.no_grad():
        return value.detach().clone() if isinstance(value, Tensor) else value


def describe_changed(names: list[str]) -> str:
    """What to do about attributes that a pass changes, as the rest of a sentence."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more}, a plain attribute, which is in no checkpoint and on no rank that is "
        "replaced: make it a buffer (register_buffer), or return it from get_extra_state()"
    )
