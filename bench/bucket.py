"""How fast checkpoints get into a bucket and back, next to obstore alone, a folder and `dcp`.

    python -m bench.bucket [MEGABYTES]

Two ranks with the same state, an S3 server on this machine, and files in the page cache. With
kdist and torch, each rank writes half of the state and reads all of it; with obstore, it puts one
object of half the size and gets both. Saves of kdist are durable, and loads verify every byte.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import torch
from obstore.store import S3Store
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from bench.ranks import free_ports, launch, report
from bench.table import columns, seconds_with_spread, title
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.storage import StoragePath, open_location
from kdist_trainer.config import CHECKPOINTS_ENDPOINT, Checkpointing, Keep
from kdist_trainer.distributed.world import World
from tests.trainer.object_store.versitygw import versitygw

RANKS, ROUNDS, LAYERS, MEGABYTES = 2, 3, 16, 1000
BUCKET, KEY, SECRET = "bench", "bench-key-id", "bench-secret"


class Contestant(NamedTuple):
    """How a rank writes the state as of a step, and reads the newest."""

    write: Callable[[int], object]
    read: Callable[[], object]


def main(megabytes: int) -> None:
    """Measure and print."""
    title(f"{megabytes} MB into a bucket and back on {RANKS} ranks, {ROUNDS} of each, in turn")
    lines, result = [], launch_with_bucket("bench.bucket", RANKS, megabytes)
    for name, numbers in result.items():
        written, read = zip(*numbers, strict=True)
        speed = [f"{megabytes / statistics.median(values):.0f} MB/s" for values in (written, read)]
        lines.append(
            (name, seconds_with_spread(written), speed[0], seconds_with_spread(read), speed[1])
        )
    columns(("median (least … most)", "written in", "", "read in", ""), lines)


def launch_with_bucket(module: str, size: int, megabytes: int) -> dict[str, list[list[float]]]:
    """The result of `module` as `size` ranks that have a folder, a bucket and `megabytes`."""
    with tempfile.TemporaryDirectory() as folder:
        extra = {"KDIST_BENCH": folder, "MASTER_PORT": str(free_ports(1)[0])}
        extra["KDIST_BENCH_MEGABYTES"] = str(megabytes)
        extra |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        with versitygw(Path(folder), access_key=KEY, secret=SECRET, bucket=BUCKET) as endpoint:
            extra[CHECKPOINTS_ENDPOINT] = endpoint
            result: dict[str, list[list[float]]] = launch(module, size, extra)
    return result


def rank() -> None:
    """One rank: the contestants write and read in turn."""
    torch.set_num_threads(1)
    folder, megabytes = Path(os.environ["KDIST_BENCH"]), int(os.environ["KDIST_BENCH_MEGABYTES"])
    with World.from_environment(timeout_seconds=300) as world:
        contestants = {
            "kdist, bucket": store(open_location(f"s3://{BUCKET}/run"), world, megabytes),
            "obstore alone": raw(world, megabytes),
            "kdist, folder": store(folder / "kdist", world, megabytes),
            "dcp.save, dcp.load, folder": torchs(folder, world, megabytes),
        }
        taken: dict[str, list[list[float]]] = {name: [] for name in contestants}
        for turn in range(ROUNDS + 1):
            for name, contestant in contestants.items():
                world.barrier()
                began = time.perf_counter()
                contestant.write(turn + 1)
                world.barrier()
                written = time.perf_counter()
                contestant.read()
                world.barrier()
                if turn:  # the first round makes buffers and groups
                    taken[name].append([written - began, time.perf_counter() - written])
        report(taken)


def make_state(megabytes: int) -> dict[str, Any]:
    """Equal layers of random numbers, of so many megabytes together."""
    generator = torch.Generator().manual_seed(0)
    width = round(megabytes * 1e6 / 4 / LAYERS)
    return {"model": {f"layer{i}": torch.randn(width, generator=generator) for i in range(LAYERS)}}


def store(root: StoragePath, world: World, megabytes: int) -> Contestant:
    """Kdist's checkpoints in a folder or a bucket."""
    state, config = make_state(megabytes), Checkpointing(mode="blocking", keep=Keep(last=1))
    manager = CheckpointManager(root, world=world, run_id="bench", config=config, job={})
    manager.load({}, fingerprint="")
    return Contestant(
        lambda step: manager.save(state, {"step": step, "samples_seen": step}, step=step),
        lambda: manager.load(state, fingerprint=""),
    )


def raw(world: World, megabytes: int) -> Contestant:
    """Obstore's own put and get of as many bytes."""
    client = S3Store(
        BUCKET,
        endpoint=os.environ[CHECKPOINTS_ENDPOINT],
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    share = os.urandom(round(megabytes * 1e6 / RANKS))
    return Contestant(
        lambda _: obstore.put(client, f"raw-{world.rank}", share),
        lambda: [obstore.get(client, f"raw-{each}").bytes() for each in range(RANKS)],
    )


def torchs(folder: Path, world: World, megabytes: int) -> Contestant:
    """Torch's own, each time in a new folder."""
    state = make_state(megabytes)
    newest = folder / "dcp-0"

    def write(step: int) -> None:
        nonlocal newest
        if world.rank == 0:
            shutil.rmtree(newest, ignore_errors=True)
        newest = folder / f"dcp-{step}"
        state_dict_saver.save(state, checkpoint_id=newest)

    return Contestant(write, lambda: state_dict_loader.load(state, checkpoint_id=newest))


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main(int(sys.argv[1]) if sys.argv[1:] else MEGABYTES)
