"""Trains on every rank that `kdist run` or torchrun starts. After a failure, or a stop, the same
command goes on at the last checkpoint.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kdist_trainer import Checkpointer, Reporter
from kdist_trainer.workloads.digits import read_scans


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def read_data() -> TensorDataset:
    return TensorDataset(*read_scans())  # handwritten digits of 8 x 8 pixels


def train(epochs: int) -> float:
    """Train the model; returns the loss of the last step."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    samples = read_data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, last = 0, float("nan")
    with Reporter() as reporter, Checkpointer(model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                step += 1
                if checkpointer.skips(step):  # done before the restart
                    continue
                optimizer.zero_grad()
                loss = cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                last = loss.item()
                reporter.step(loss=last, samples=len(images), step=step)
                checkpointer.maybe_save(step)
                if checkpointer.stop_requested:  # all ranks have saved
                    return last
        checkpointer.finish(step)
    dist.destroy_process_group()
    return last


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    train(parser.parse_args().epochs)
