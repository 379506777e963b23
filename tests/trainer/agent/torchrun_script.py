"""A plain torchrun script that knows nothing of kdist: writes down all that it can see, in each
try, and the weights that it has after training a little in several ways.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    seen = {
        "environment": dict(os.environ),
        "argv": sys.argv,
        "cwd": str(Path.cwd()),
        "file": __file__,
        "path": sys.path[0],
    }
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"{rank}-try-{attempt}.json").write_text(json.dumps(seen))
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 2 + rank))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = next(model.parameters()).detach().mean()
    dist.all_reduce(mean)
    shard = nn.Linear(16, 8)
    fully_shard(shard)
    fixed = DistributedDataParallel(nn.Linear(8, 4), static_graph=True)
    compiled = torch.compile(fixed, backend="aot_eager")
    for _ in range(3):
        total = functional.all_reduce(
            compiled(shard(torch.ones(2, 16))), "sum", list(range(dist.get_world_size()))
        )
        (total.square().mean() + mean).backward()
    assert isinstance(shard, FSDPModule)
    shard.unshard()
    learned = [
        *model.parameters(),
        *(one.grad for one in fixed.parameters() if one.grad is not None),
        *shard.parameters(),
    ]
    weights = [value for parameter in learned for value in parameter.detach().flatten().tolist()]
    (folder / f"{rank}.json").write_text(json.dumps(weights))
    dist.destroy_process_group()
