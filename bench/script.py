"""A plain DDP script with a checkpoint every 20 steps, as torchrun's documentation would have it;
for bench.recovery.

Each rank appends one line per finished step to the file in $KDIST_BENCH_MARKS: its pid, its rank,
the step, the clock and kdist's generation.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EVERY = 20


def mark(step: int) -> None:
    """Note that this rank has finished a step."""
    generation = os.environ.get("KDIST_GENERATION", "0")
    line = f"{os.getpid()} {os.environ['RANK']} {step} {time.monotonic()} {generation}\n"
    with Path(os.environ["KDIST_BENCH_MARKS"]).open("a") as file:
        file.write(line)


def main() -> None:
    """Train until somebody ends it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters())
    saved = Path(os.environ["KDIST_BENCH_MARKS"]).with_name("checkpoint.pt")
    step = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        optimizer.zero_grad()
        loss: torch.Tensor = nn.functional.cross_entropy(
            model(torch.randn(64, 64)), torch.randint(10, (64,))
        )
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own gap
        optimizer.step()
        step += 1
        mark(step)
        if step % EVERY == 0:
            if dist.get_rank() == 0:
                torch.save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    },
                    f"{saved}.tmp",
                )
                Path(f"{saved}.tmp").replace(saved)
            dist.barrier()
        # a step of a real size, so that the machine is not busy with the steps themselves
        time.sleep(0.02)


if __name__ == "__main__":
    main()
