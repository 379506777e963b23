"""digits: handwritten digits (real scans of 8 x 8 pixels) and a small convolutional network.

`digits.bin.gz` has the scans: "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak (UCI Machine Learning Repository, doi:10.24432/C50P49, licence CC BY 4.0), its test set as
scikit-learn's `load_digits` has it. Decompressed it is 64 bytes a scan, row by row, each a pixel
from 0 to 16, and then one byte a scan, its digit.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from kdist_trainer.config.workload_options import DigitsOptions
from kdist_trainer.errors import DataError
from kdist_trainer.workload import Split, Sums, Workload, WorkloadContext

SCANS = 1797
TEST_SAMPLES = 360


class Digits(Workload):
    """Ten classes; about 98 % of the test scans are recognized after twenty epochs."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.options = context.parse(DigitsOptions)

    def model(self) -> nn.Module:
        """Two convolutions, one pooling, one hidden layer; (batch, 1, 8, 8) to (batch, 10)."""
        width = self.options.width
        return nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 128),
            nn.ReLU(),
            nn.Dropout(self.options.dropout),
            nn.Linear(128, 10),
        )

    def dataset(self, split: Split) -> TensorDataset:
        """`TEST_SAMPLES` to test, the others to train: a fixed shuffle, since the file is
        ordered by writer.
        """
        images, labels = read_scans()
        shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        chosen = shuffled[:-TEST_SAMPLES] if split == "train" else shuffled[-TEST_SAMPLES:]
        return TensorDataset(images[chosen], labels[chosen])

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Cross-entropy of the ten classes."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels, reduction="sum"), len(labels)

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        """Accuracy and loss."""
        images, labels = batch
        scores = model(images)
        correct = (scores.argmax(dim=1) == labels).sum()
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        return {"accuracy": (correct, len(labels)), "loss": (loss, len(labels))}


def read_scans() -> tuple[Tensor, Tensor]:
    """All scans: pixels from 0 to 1, float32, shape (1797, 1, 8, 8), and labels, int64, shape
    (1797,). Raises `DataError` if the file cannot be read.
    """
    path = Path(__file__).with_name("digits.bin.gz")
    try:
        content = bytearray(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"the scans of the workload digits cannot be read: {error}") from error
    values = torch.frombuffer(content, dtype=torch.uint8)
    pixels, labels = values[:-SCANS].reshape(SCANS, 1, 8, 8), values[-SCANS:]
    return pixels.to(torch.float32) / 16, labels.to(torch.int64)
