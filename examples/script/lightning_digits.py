"""Lightning's `Trainer` with kdist's line, on the digits of scikit-learn.

    kdist run --procs-per-node 2 examples/script/lightning_digits.py

Kill a rank while it runs: all start again at the last checkpoint. Ctrl-C saves and stops; the same
command goes on. Under torchrun the line does nothing.

Lightning itself does not continue within an epoch at the next batch, unless the loader has a state.
`Digits` has one, so this training ends bitwise as one that nothing interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from kdist_trainer.integrations import KdistCallback

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits:
    """Batches of this rank, shuffled by the epoch; knows where it is."""

    def __init__(self, batch: int) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target)
        self.batch = batch
        self.epoch = self.next = 0

    def __len__(self) -> int:
        return len(self.labels) // self.batch // int(os.environ["WORLD_SIZE"])

    def __iter__(self) -> Iterator[Batch]:
        if self.next == len(self):
            self.epoch, self.next = self.epoch + 1, 0
        order = torch.randperm(
            len(self.labels), generator=torch.Generator().manual_seed(self.epoch)
        )
        own = order[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
        while self.next < len(self):
            self.next += 1
            at = own[(self.next - 1) * self.batch : self.next * self.batch]
            yield self.images[at], self.labels[at]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.next = state["epoch"], state["next"]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
        )

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        self.log("val_loss", cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", default="output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=arguments.epochs,
        log_every_n_steps=1,
        logger=CSVLogger(
            arguments.output,
            version=os.environ.get("KDIST_GENERATION", "0"),
            flush_logs_every_n_steps=1,
        ),
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        callbacks=[KdistCallback(every_steps=20)],
    )
    samples = Digits(16)
    held_out = TensorDataset(samples.images[-256:], samples.labels[-256:])
    trainer.fit(model, samples, DataLoader(held_out, batch_size=64))
    if trainer.is_global_zero:
        weights = model.state_dict()
        everything = b"".join(weights[name].cpu().numpy().tobytes() for name in sorted(weights))
        print(f"weights {hashlib.sha256(everything).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
