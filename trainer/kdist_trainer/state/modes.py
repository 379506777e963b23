"""Puts a module into eval mode and back, as its own code expects it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
