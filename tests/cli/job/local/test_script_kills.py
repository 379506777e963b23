"""A script with dropout, random batches and a position of each rank, killed midway, ends with the
weights of a run that nothing interrupts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.running import Start, write_script

SCRIPT = """
import hashlib
import os
import random
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist

from kdist_trainer import Checkpointer, Reporter

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
layers = torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
with (
    Reporter() as reporter,
    Checkpointer(model=model, optimizer=optimizer, every_steps=3, mode="blocking") as checkpointer,
):
    first = checkpointer.resume()
    assert checkpointer.state.get("row", (rank, 0)) == (rank, first)
    for step in range(first + 1, 13):
        scale = random.random() + np.random.rand()
        (model(torch.randn(2, 8)) * scale).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.state["row"] = (rank, step)
        reporter.step(samples=2)
        checkpointer.maybe_save(step)
        if step == 8 and first == 0 and rank == 1 and "killed" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.finish(step)
weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
if rank == 0:
    print("after", first, "weights", hashlib.sha256(weights).hexdigest(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.sampled
def test_a_script_that_draws_random_numbers_ends_alike_whether_it_is_killed_or_not(
    start: Start, tmp_path: Path
) -> None:
    path = write_script(tmp_path, SCRIPT, "train.py")
    found = []
    for arguments in ([], ["killed"]):
        run = start("--fresh", "--procs-per-node", "2", path, *arguments)
        printed = run.wait(0) + run.errors()
        found.append(re.findall(r"after (\d+) weights ([0-9a-f]{64})", printed)[-1])
    assert [first for first, _ in found] == ["0", "6"]
    assert found[0][1] == found[1][1]
