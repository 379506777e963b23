"""The digits, at a walking pace: steps last long enough to be disturbed, and leave the cores to the other tests."""

import time
from typing import Any

from torch import Tensor, nn

from kdist_trainer.workloads.digits import Digits


class Calm(Digits):
    """Options as those of `digits`."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """The loss of `digits`, a twentieth of a second later."""
        time.sleep(0.05)
        return super().loss(model, batch)
