"""Has batch norms use their running statistics where a micro-batch has none of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn import SyncBatchNorm

from kdist_trainer.torch_internals import BatchNorm


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
        """Set whether batch norms use their running statistics."""
        if on and not self._modes:
            self._modes = [(norm, norm.training) for norm in self._norms]
            for norm in self._norms:
                norm.training = False
        elif not on:
            for module, mode in self._modes:
                module.training = mode
            self._modes = []
