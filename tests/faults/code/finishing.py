"""A script with kdist's `Checkpointer` that finishes once a file says so: the argument is its path.

Each rank appends every step that it does to `steps-RANK` next to that file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from kdist_trainer import Checkpointer, Reporter

STEPS = 20
signal = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
with (
    Reporter() as reporter,
    Checkpointer(model=model, optimizer=optimizer) as checkpointer,
    signal.with_name(f"steps-{dist.get_rank()}").open("a", buffering=1) as steps,
):
    for step in range(checkpointer.resume() + 1, STEPS + 1):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reporter.step(samples=8, target_steps=STEPS)
        checkpointer.maybe_save(step)
        print(step, file=steps)
    while not signal.exists():
        time.sleep(0.01)
    checkpointer.finish(STEPS)
