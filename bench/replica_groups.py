"""Two replica groups of one rank each under torchft, as its documentation starts them: a lighthouse
and a torchrun for each group; for bench.recovery.

    python -m bench.replica_groups

The training is that of bench.script. A replica group that loses its peer discards the step, and
goes on alone once the lighthouse has found a new quorum. A generation in the marks is the number of
times that a group has seen the number of participants change.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

GROUPS = 2
_GROUP = "REPLICA_GROUP_ID"


def launch() -> None:
    """Start the lighthouse and the groups, and wait for them."""
    from torchft.coordination import LighthouseServer  # a peer that need not be installed

    # the values of torchft's README, so that a group that is lost does not end the others
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100
    )
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    groups = [
        subprocess.Popen(
            [*torchrun, "--nproc-per-node=1", "--max-restarts=100", "-m", "bench.replica_groups"],
            env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), _GROUP: str(number)},
        )
        for number in range(GROUPS)
    ]
    for group in groups:
        group.wait()


def mark(group: int, step: int, generation: int) -> None:
    """Note that this group has finished a step."""
    line = f"{os.getpid()} {group} {step} {time.monotonic()} {generation}\n"
    with Path(os.environ["KDIST_BENCH_MARKS"]).open("a") as file:
        file.write(line)


def train(group: int) -> None:
    """Train until somebody ends it."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.AdamW(plain.parameters())

    def load(state: dict[str, Any]) -> None:
        plain.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"group-{group}",
    )
    model = DistributedDataParallel(manager, plain)
    optimizer = Optimizer(manager, inner)
    participants = generation = 0
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        loss: torch.Tensor = nn.functional.cross_entropy(
            model(torch.randn(64, 64)), torch.randint(10, (64,))
        )
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own gap
        optimizer.step()
        if manager.current_step() > step:
            if manager.num_participants() != participants:
                participants, generation = manager.num_participants(), generation + 1
            mark(group, manager.current_step(), generation)
        time.sleep(0.02)  # as in bench.script


if __name__ == "__main__":
    if _GROUP in os.environ:
        train(int(os.environ[_GROUP]))
    else:
        launch()
