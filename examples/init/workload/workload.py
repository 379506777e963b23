"""The training: a model, its data and a loss. kdist's training loop does the rest.

Put your model and your data in the place of these; `pytest` says in seconds what the loop cannot
work with.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from kdist_trainer.workload import Split, Sums, Workload
from kdist_trainer.workloads.digits import read_scans


class Classifier(Workload):
    def model(self) -> nn.Module:
        width = self.context.options.get("width", 64)  # of train.options in job.yaml
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def dataset(self, split: Split) -> TensorDataset:
        images, labels = read_scans()  # handwritten digits of 8 x 8 pixels
        for_test = torch.arange(len(labels)) % 5 == 0
        chosen = for_test if split == "test" else ~for_test
        return TensorDataset(images[chosen], labels[chosen])

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """The sum of the losses, and their number."""
        images, labels = batch
        return cross_entropy(model(images), labels, reduction="sum"), len(labels)

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        images, labels = batch
        return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}
