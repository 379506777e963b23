"""FSDP2 (`fully_shard`) with kdist's `Reporter` and `Checkpointer`: each rank saves and loads its
own shards by torch's DCP, so no rank ever holds the whole state.

    kdist run --procs-per-node 2 examples/script/fsdp_kdist.py

Kill a rank while it runs: all start again at the last checkpoint. Ctrl-C saves and stops; the same
command goes on, also with another number of ranks.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from ddp import load_samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from kdist_trainer import Checkpointer, Reporter


def digest(model: nn.Module) -> str:
    """SHA-256 of all weights, gathered one after the other; called on every rank."""
    sha = hashlib.sha256()
    for _, weight in sorted(model.named_parameters()):
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        sha.update(whole.detach().cpu().numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device("cuda" if on_gpu else "cpu")
    samples = load_samples()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples, seed=0)
    loader = DataLoader(samples, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = arguments.epochs * len(loader)
    with (
        Reporter() as reporter,
        Checkpointer(model=model, optimizer=optimizer, every_steps=20) as checkpointer,
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
                loss = cross_entropy(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {loss.item()}", flush=True)
                reporter.step(loss=loss.item(), samples=len(images), step=step, target_steps=steps)
                checkpointer.maybe_save(step)
                if checkpointer.stop_requested:
                    return
        weights = digest(model)
        checkpointer.finish(step, weights=weights)
    if dist.get_rank() == 0:
        print(f"weights {weights}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
