"""An image classifier: handwritten digits of 8 x 8 points, all classes equally often."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from kdist_trainer.workload import Samples, Split, Sums, Workload
from kdist_trainer.workloads.digits import read_scans


class Images(Workload):
    def model(self) -> nn.Module:
        width = self.context.options.get("width", 16)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )

    def dataset(self, split: Split) -> TensorDataset:
        images, labels = read_scans()
        for_test = torch.arange(len(labels)) % 5 == 0
        chosen = for_test if split == "test" else ~for_test
        return TensorDataset(images[chosen], labels[chosen])

    def weights(self, samples: Samples) -> Tensor:
        labels = torch.stack([samples[index][1] for index in range(len(samples))])
        return (1 / torch.bincount(labels).double())[labels]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        images, labels = batch
        return functional.cross_entropy(model(images), labels, reduction="sum"), len(labels)

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        images, labels = batch
        return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}
