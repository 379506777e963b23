"""Lightning's `Trainer` with kdist's callback: it goes on at the last checkpoint after a failure or
a stop. Under torchrun the callback does nothing.
"""

import argparse
import os

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from kdist_trainer.integrations import KdistCallback
from kdist_trainer.workloads.digits import read_scans

Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def read_data() -> TensorDataset:
    return TensorDataset(*read_scans())  # handwritten digits of 8 x 8 pixels


def train(epochs: int) -> float:
    """Train the model; returns the loss of the last step."""
    lightning.seed_everything(0)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # what the launcher has started
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        devices=devices,
        num_nodes=nodes,
        strategy="auto" if devices * nodes == 1 else "ddp",
        max_epochs=epochs,
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,  # the callback saves
        enable_progress_bar=False,
        callbacks=[KdistCallback()],
    )
    trainer.fit(Classifier(), DataLoader(read_data(), batch_size=32, shuffle=True))
    return float(trainer.callback_metrics["train_loss"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    train(parser.parse_args().epochs)
