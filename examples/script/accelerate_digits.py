"""A loop of Accelerate with kdist's lines, on the digits of scikit-learn.

    kdist run --procs-per-node 2 examples/script/accelerate_digits.py

Kill a rank while it runs: all start again at the last checkpoint. Ctrl-C saves and stops; the same
command goes on. Under torchrun the lines do nothing.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from kdist_trainer.integrations import KdistTracker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tracker = KdistTracker(every_steps=20)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        log_with=tracker,
        # the order of an epoch follows from its number, not from the random numbers drawn so far
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    digits = load_digits()
    samples = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # with random numbers of its own: else a loader that starts again shifts those of the dropout
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(samples, batch_size=16, shuffle=True, generator=generator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("digits", {"max_train_steps": arguments.epochs * len(loader)})
    done = tracker.resume(accelerator)
    step = done
    for epoch in range(done // len(loader), arguments.epochs):
        loader.set_epoch(epoch)
        batches = skip_first_batches(loader, step - epoch * len(loader))
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            accelerator.print(f"step {step}: loss {loss.item()}", flush=True)
            accelerator.log({"loss": loss.item(), "lr": 1e-3}, step=step)
            if tracker.step(step, samples=len(images)):
                return
    accelerator.end_training()
    if accelerator.is_main_process:
        weights = accelerator.unwrap_model(model).state_dict()
        everything = b"".join(weights[name].cpu().numpy().tobytes() for name in sorted(weights))
        print(f"weights {hashlib.sha256(everything).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
