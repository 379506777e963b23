"""A custom workload: which of three growers a wine comes from, by 13 measurements
(`wine.csv`: "Wine" by S. Aeberhard and M. Forina, UCI Machine Learning Repository, CC BY 4.0).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from kdist_trainer.workload import Split, Sums, Workload


class Wine(Workload):
    def model(self) -> nn.Module:
        width = self.context.options.get("width", 32)
        return nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Linear(width, 3))

    def dataset(self, split: Split) -> TensorDataset:
        table = np.loadtxt(Path(__file__).with_name("wine.csv"), delimiter=",", dtype=np.float32)
        inputs, labels = torch.tensor(table[:, :-1]), torch.tensor(table[:, -1]).long()
        inputs = (inputs - inputs.mean(0)) / inputs.std(0)
        for_test = torch.arange(len(inputs)) % 5 == 0
        chosen = for_test if split == "test" else ~for_test
        return TensorDataset(inputs[chosen], labels[chosen])

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        inputs, labels = batch
        return {"accuracy": ((model(inputs).argmax(1) == labels).sum(), len(labels))}
