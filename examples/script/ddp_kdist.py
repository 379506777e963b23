"""The same script with kdist's `Reporter` and `Checkpointer`: metrics, a watchdog, and a training
that survives its ranks.

    kdist run examples/script/job.yaml

Kill a rank while it runs: all start again at the last checkpoint. Ctrl-C saves and stops; the same
command goes on. Under torchrun both additions are silent, so the script still runs there.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from ddp import digest
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kdist_trainer import Checkpointer, Reporter
from kdist_trainer.workloads.digits import read_scans


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    images, labels = read_scans()
    samples = TensorDataset(images.flatten(1), labels)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples, seed=0)
    loader = DataLoader(samples, batch_size=32, sampler=sampler)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        Reporter() as reporter,
        Checkpointer(model=module, optimizer=optimizer, every_steps=20) as checkpointer,
    ):
        checkpointer.resume()
        step = 0
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                step += 1
                if checkpointer.skips(step):
                    continue  # done before the restart
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                reporter.step(loss=loss.item(), samples=len(images), learning_rate=1e-3)
                checkpointer.maybe_save(step)
                if checkpointer.stop_requested:
                    return
        checkpointer.finish(step, weights=digest(module))
    if dist.get_rank() == 0:
        print(f"weights {digest(module)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
