"""The digits at a walking pace, with the ailments that files in `$FLAGS` name while they are
there.
"""

import math
import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kdist_trainer.workloads.digits import Digits


class Sick(Digits):
    """`slow`: rank 1 takes its time; `nan`: the loss is none."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """The loss of `digits`, a twentieth of a second later or as the flags say."""
        flags = Path(os.environ["FLAGS"])
        time.sleep(0.05)
        if os.environ["RANK"] == "1" and (flags / "slow").exists():
            time.sleep(0.3)
        loss, count = super().loss(model, batch)
        return (loss * math.nan if (flags / "nan").exists() else loss), count
