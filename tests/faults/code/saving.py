"""A script with kdist's `Checkpointer` on storage that holds each save: the arguments are the
folder of `paused.hold_storage`, and that of the checkpoints.

After each step rank 0 writes to `steps` the generation, the step, and whether a checkpoint exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from paused import hold_storage
from torch import nn

from kdist_trainer import Checkpointer, Reporter

folder, checkpoints = map(Path, sys.argv[1:])
hold_storage(folder, "write")
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
with (
    Reporter() as reporter,
    Checkpointer(model=model, optimizer=optimizer, every_seconds=1) as checkpointer,
    (folder / "steps").open("a", buffering=1) as steps,
):
    step = checkpointer.resume()
    while not checkpointer.stop_requested:
        step += 1
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)
        reporter.step(samples=8)
        checkpointer.maybe_save(step)
        if dist.get_rank() == 0:
            is_saved = any(checkpoints.glob("step-*/manifest.json"))
            print(os.environ["KDIST_GENERATION"], step, int(is_saved), file=steps)
