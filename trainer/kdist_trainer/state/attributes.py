"""What modules hold besides their state: plain attributes (numbers, strings and tensors), and train
or eval mode. Attributes are not saved, so a change by a pass or a step must be found and reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kdist_trainer.state.kinds import digest_of

_KINDS: Final = (int, float, str, Tensor)
_TORCH_NOTES: Final = ("_opt_called", "_step_count", "_warned")
"""What torch's schedulers and optimizers note about their warnings on an optimizer."""


class _Attribute(NamedTuple):
    owner: object
    key: str
    name: str
    """Full name in the model."""


class Attributes:
    """The plain attributes of a model or of an optimizer as they are when this is made. Modules
    with an extra state of their own are left out: theirs is kept.
    """

    def __init__(self, owner: nn.Module | Optimizer) -> None:
        found = _find(owner) if isinstance(owner, nn.Module) else _find_in_optimizer(owner)
        self._before: dict[_Attribute, tuple[Any, Any]] = {
            each: (value, _copy(value)) for each, value in found
        }

    def find_changed(self) -> list[str]:
        """The full names of the attributes that have other values now."""
        return [each.name for each, _ in self._changed()]

    def restore(self) -> list[str]:
        """Put back the values that are others now; returns the full names of these attributes."""
        changed = list(self._changed())
        for (owner, key, _), (value, copy) in changed:
            if isinstance(value, Tensor) and digest_of(value) != digest_of(copy):
                value.detach().copy_(copy)
            vars(owner)[key] = value
        return [each.name for each, _ in changed]

    def _changed(self) -> Iterator[tuple[_Attribute, tuple[Any, Any]]]:
        for each, (value, copy) in self._before.items():
            if digest_of(getattr(each.owner, each.key, None)) != digest_of(copy):
                yield each, (value, copy)


def _find(module: nn.Module) -> Iterator[tuple[_Attribute, Any]]:
    for path, owner in module.named_modules():
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            continue
        for key, value in _values(owner, nn.Module):
            if key != "training":
                yield _Attribute(owner, key, f"{path or type(owner).__name__}.{key}"), value


def _find_in_optimizer(owner: Optimizer) -> Iterator[tuple[_Attribute, Any]]:
    for key, value in _values(owner, Optimizer):
        if not key.startswith(_TORCH_NOTES):
            yield _Attribute(owner, key, f"{type(owner).__name__}.{key}"), value


def _values(owner: object, base: type) -> Iterator[tuple[str, Any]]:
    """The values of an object's attributes, and of those that it still has from a class of its
    own: an assignment makes them its own.
    """
    kinds = [one for one in type(owner).__mro__ if one is not base and issubclass(one, base)]
    for key in dict.fromkeys(chain(vars(owner), *(vars(one) for one in kinds))):
        value = vars(owner).get(key, getattr(type(owner), key, None))
        if isinstance(value, _KINDS) and not key.startswith("__"):
            yield key, value


def _copy(value: Any) -> Any:
    with torch.no_grad():
        return value.detach().clone() if isinstance(value, Tensor) else value


def describe_changed(names: list[str], *, in_optimizer: bool = False) -> str:
    """What to do about attributes that a pass or a step changes, as the rest of a sentence."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    owner, advice = "", "make it a buffer (register_buffer), or return it from get_extra_state()"
    if in_optimizer:
        owner, advice = " of the optimizer", "keep it in self.state or in param_groups"
    return (
        f"{names[0]}{more}, a plain attribute{owner}, which is in no checkpoint and on no rank "
        f"that is replaced: {advice}"
    )


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Within the `with` block, the module is in eval mode; afterwards each submodule is in its
    former mode, since users may have frozen some.

    The module's `train` is called both times: a model may swap weights there, or merge them.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train(modes[0][1])
        for part, mode in modes:
            if part.training != mode:
                part.training = mode
