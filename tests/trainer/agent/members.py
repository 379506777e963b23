"""What ranks run in the tests of the agent: a loop of all-reduces that does as files in the folder $LAB tell it.

`finish` ends it as done, `raise-RANK` raises there. Each rank keeps `rank-RANK.json` up to date: who and where it is, and its
step.
"""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kdist_trainer.heartbeat import Heartbeat, Phase


def train() -> str:
    """Meet the peers and step together until told to end; returns "done" or "stopped"."""
    folder, rank = Path(os.environ["LAB"]), int(os.environ["RANK"])
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    heartbeat = Heartbeat.attach(Path(os.environ["KDIST_SCRATCH"], f"rank-{os.environ['LOCAL_RANK']}.heartbeat"))
    heartbeat.beat(Phase.RENDEZVOUS, -1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    step = 0
    while True:
        step += 1
        heartbeat.beat(Phase.STEP, step)
        _write(folder / f"rank-{rank}.json", step)
        if (folder / f"raise-{rank}").exists():
            raise ValueError(f"bad sample on rank {rank}")
        flags = torch.tensor([len(asked), (folder / "finish").exists()], dtype=torch.int32)
        heartbeat.enter("all_reduce", flags.numel(), str(flags.dtype))
        dist.all_reduce(flags)
        heartbeat.leave()
        if flags.any():
            dist.barrier()
            dist.destroy_process_group()
            return "stopped" if flags[0] else "done"
        time.sleep(0.02)  # a step takes its time


def crash() -> str:
    """Die at once, as often as it is started."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def devour() -> str:
    """Take memory until somebody stops it."""
    taken = []
    while True:
        taken.append(bytearray(b"x" * 10_000_000))


def _write(path: Path, step: int) -> None:
    environment = os.environ
    known = {name.lower(): environment[name] for name in ("RANK", "WORLD_SIZE", "KDIST_NODE", "KDIST_GENERATION", "KDIST_NODES")}
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps({**known, "pid": os.getpid(), "step": step}))
    fresh.replace(path)
