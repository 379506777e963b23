"""What ranks run in the tests of the agent: a loop of all-reduces that does as files in the folder
$LAB tell it.

`finish` ends it as done, `raise-RANK` raises there, `leave-RANK` leaves by `os._exit(0)`,
`hold-RANK` keeps it from meeting its peers, `slow-RANK` lets its next step compute until the file
is gone. With $LAB_CHILDREN each rank starts processes that hold its sockets. Each rank keeps
`rank-RANK.json` up to date: who and where it is, and its step.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Listener
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.processes.liveness import Heartbeat, Phase

_open: list[Listener] = []


def train() -> str:
    """Meet the peers and step together until told to end; returns "done" or "stopped"."""
    folder, rank = Path(os.environ["LAB"]), int(os.environ["RANK"])
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    heartbeat = Heartbeat.attach(
        Path(os.environ["KDIST_SCRATCH"], f"rank-{os.environ['LOCAL_RANK']}.heartbeat")
    )
    heartbeat.beat(Phase.RENDEZVOUS, -1)
    _write(folder / f"rank-{rank}.json", 0)
    _wait_while(folder / f"hold-{rank}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if "LAB_CHILDREN" in os.environ:
        bear(folder, rank)
    step = 0
    while True:
        step += 1
        heartbeat.beat(Phase.STEP, step)
        _write(folder / f"rank-{rank}.json", step)
        if (folder / f"raise-{rank}").exists():
            raise ValueError(f"bad sample on rank {rank}")
        if (folder / f"leave-{rank}").exists():
            os._exit(0)
        _wait_while(folder / f"slow-{rank}")
        flags = torch.tensor([len(asked), (folder / "finish").exists()], dtype=torch.int32)
        heartbeat.enter("all_reduce", flags.numel(), str(flags.dtype))
        dist.all_reduce(flags)
        heartbeat.leave()
        if flags.any():
            dist.barrier()
            dist.destroy_process_group()
            return "stopped" if flags[0] else "done"
        time.sleep(0.02)  # a step takes its time


def bear(folder: Path, rank: int) -> None:
    """Fork a child, a child with a session of its own, and a daemon: each leaves its pid in
    `child-RANK-KIND`, and stays.
    """
    _open.append(Listener(family="AF_UNIX"))  # as a rank with loader processes does
    for kind in ("child", "session", "daemon"):
        if os.fork() == 0:
            if kind != "child":
                os.setsid()
            if kind != "daemon" or os.fork() == 0:
                (folder / f"child-{rank}-{kind}").write_text(str(os.getpid()))
                while True:
                    signal.pause()
            os._exit(0)


def _wait_while(path: Path) -> None:
    while path.exists():
        time.sleep(0.02)


def disagree() -> NoReturn:
    """Three collectives in harmony; in the fourth, named by $LAB_OP, rank 1 does as $LAB_ODD says,
    and then all go on.
    """
    rank, op, odd = int(os.environ["RANK"]), os.environ["LAB_OP"], os.environ["LAB_ODD"]
    heartbeat = Heartbeat.attach(
        Path(os.environ["KDIST_SCRATCH"], f"rank-{os.environ['LOCAL_RANK']}.heartbeat")
    )
    collective_hooks.install_recorder(heartbeat)
    dist.init_process_group("gloo", timeout=timedelta(seconds=int(os.environ["LAB_TIMEOUT"])))
    for step in range(1, 4):
        heartbeat.beat(Phase.STEP, step)
        dist.all_reduce(torch.ones(4))
    heartbeat.beat(Phase.STEP, 4)
    elements = 8192
    if rank == 1:
        if odd == "raise":
            raise ValueError("bad sample")
        if odd == "hang":
            time.sleep(1000)
        if odd in ("abort", "segfault"):
            os.kill(os.getpid(), signal.SIGABRT if odd == "abort" else signal.SIGSEGV)
        elements = 12000 if odd == "shape" else elements
        op = op if odd != "op" else "barrier" if op != "barrier" else "all_reduce"
    _call(op, elements)
    while True:  # a broadcast of the wrong size goes through, and its root is through at once
        heartbeat.beat(Phase.STEP, 5)
        dist.all_reduce(torch.ones(4))
        time.sleep(0.5)


def _call(op: str, elements: int) -> None:
    """One collective in which each rank gives so many elements."""
    size = dist.get_world_size()
    one = torch.ones(elements)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_gather": lambda: dist.all_gather([torch.empty(elements) for _ in range(size)], one),
        "broadcast": lambda: dist.broadcast(one, 0),
        "reduce_scatter": lambda: dist.reduce_scatter_single(one, torch.ones(elements * size)),
        "barrier": dist.barrier,
    }
    calls[op]()


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
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "KDIST_NODE", "KDIST_GENERATION", "KDIST_NODES")
    known = {name.lower(): environment[name] for name in names}
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps({**known, "pid": os.getpid(), "step": step}))
    fresh.replace(path)
