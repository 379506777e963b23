"""The launch style of many tutorials: the script starts its own processes, and is given which
machine of how many it runs on.

    one machine, two processes:
    python examples/script/classic.py --nodes 1 --gpus 2 --nr 0 --epochs 2

    two nodes, one process each:
    kdist run --nodes 2 examples/script/classic.py --nodes 2 --gpus 1 --epochs 2

On a cluster nobody types `--nr`: torchrun and kdist give every node its number (GROUP_RANK) and the
first one's address. Without GPUs the processes train on the CPU. A script that leaves starting to
torchrun, as ddp.py does, is shorter and heals.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", type=int, default=1, help="machines")
    parser.add_argument(
        "-g", "--gpus", type=int, default=1, help="processes on each machine, one per GPU"
    )
    parser.add_argument(
        "-nr",
        "--nr",
        type=int,
        default=int(os.environ.get("GROUP_RANK", "0")),
        help="number of this machine",
    )
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    args.world_size = args.gpus * args.nodes
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    spawn(train, nprocs=args.gpus, args=(args,))


def train(gpu: int, args: argparse.Namespace) -> None:
    """One process: `gpu` is its number on this machine."""
    rank = args.nr * args.gpus + gpu
    on_gpu = torch.cuda.is_available() and args.gpus <= torch.cuda.device_count()
    device = torch.device("cuda", gpu) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method="env://", world_size=args.world_size, rank=rank
    )
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    model = DistributedDataParallel(module, device_ids=[gpu] if on_gpu else None)
    digits = load_digits()
    samples = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        samples, args.world_size, rank
    )
    loader = DataLoader(samples, batch_size=64, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = criterion(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1} of {args.epochs}: loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
