"""The digits, at a walking pace, with a data set next to them of which only the files are read."""

import sys
from pathlib import Path

from calm import Calm
from torch.utils.data import TensorDataset

from kdist_trainer.workload import Split


class Corpus(Calm):
    """Prints each file below `/corpus` with its size, before it trains."""

    def dataset(self, split: Split) -> TensorDataset:
        """That of `digits`."""
        folder = Path(self.context.data["/corpus"])
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                sys.stdout.write(f"corpus {path.relative_to(folder)} {path.stat().st_size}\n")
        return super().dataset(split)
