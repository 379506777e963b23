"""A plain PyTorch DDP script: it knows nothing of kdist and runs unchanged under torchrun and under
kdist.

    torchrun --nproc-per-node 2 examples/script/ddp.py --epochs 3
    kdist run --procs-per-node 2 examples/script/ddp.py --epochs 3

At its end rank 0 prints a digest of the weights: bitwise identical under both.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="samples in one step of one rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def load_samples() -> TensorDataset:
    from sklearn.datasets import load_digits  # here: ddp_kdist.py runs without scikit-learn

    digits = load_digits()
    return TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )


def digest(model: nn.Module) -> str:
    """SHA-256 of all weights, in the order of their names."""
    weights = model.state_dict()
    return hashlib.sha256(
        b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    ).hexdigest()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    samples = load_samples()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples, seed=0)
    loader = DataLoader(samples, batch_size=arguments.batch, sampler=sampler)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        print(f"weights {digest(module)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
