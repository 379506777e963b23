"""Trainings whose ranks are killed at drawn steps, with loaders of other libraries: which samples
counted in the end.

    python -m tests.trainer.script.loader_kills --seeds 25        prints a table

Each rank is a fork of this process, with gloo and a `Checkpointer`, and notes the samples of a step
before it may be saved. What a later start does again did not count.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here and not in each rank
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # likewise
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch._C._distributed_c10d import FileStore
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from kdist_trainer import Checkpointer, ShardedLoader

SAMPLES = 144
STEPS = 24
SHARDS = 6
EPOCHS = 2
SIZES = (2, 3, 2, 2)
"""Ranks of each start; all but the last are killed, and 3 are refused where a loader cannot."""
NAMED = "stateful['data'] ("
Batches = Iterator[tuple[int, list[int]]]
"""The epoch and the samples of each step of this rank."""


def stream() -> IterableDataset:
    return Dataset.from_dict({"id": list(range(SAMPLES))}).to_iterable_dataset(num_shards=24)


def ids(batch: Any) -> list[int]:
    return [int(one) for one in torch.as_tensor(batch["id"]).flatten()]


class ResumableDataset(torch.utils.data.IterableDataset[Any]):
    """A streaming set that keeps a position it was given until it is read on: that of `datasets`
    5.2 says that it is at the start, and so a loader process that has yielded nothing since a
    resume begins again there. docs/how-to/data-position.md shows it.
    """

    def __init__(self, dataset: IterableDataset) -> None:
        self.dataset, self.loaded = dataset, None

    def __iter__(self) -> Iterator[Any]:
        for sample in self.dataset:
            self.loaded = None
            yield sample

    def state_dict(self) -> Any:
        return self.loaded or self.dataset.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.loaded = saved
        self.dataset.load_state_dict(saved)


class Torchdata:
    """A set with an index, shuffled, in torchdata's loader."""

    def __init__(self, workers: int) -> None:
        records = [{"id": number} for number in range(SAMPLES)]
        self.sampler: Any = StatefulDistributedSampler(records, shuffle=True)
        self.loader = StatefulDataLoader(records, 6, sampler=self.sampler, num_workers=workers)
        self.stateful: Any = self.loader

    def begin(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def batches(self, first: int) -> Batches:
        for epoch in range(first, EPOCHS):
            self.begin(epoch)
            for batch in self.loader:
                yield epoch, ids(batch)


class Streaming(Torchdata):
    """A streaming set of Hugging Face in torchdata's loader."""

    def __init__(self, workers: int) -> None:
        self.set = split_dataset_by_node(stream(), dist.get_rank(), dist.get_world_size())
        self.loader = StatefulDataLoader(
            ResumableDataset(self.set) if workers else self.set, 6, num_workers=workers
        )
        self.stateful = self.loader

    def begin(self, epoch: int) -> None:
        self.set.set_epoch(epoch)


class StreamAlone(Streaming):
    """A streaming set of Hugging Face whose own state is saved, without loader processes."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.loader = torch.utils.data.DataLoader(self.set, 6)
        self.stateful = self.set


class Sharded:
    """Any of these by virtual shards: here the streaming set in torchdata's loader."""

    def __init__(self, workers: int) -> None:
        def make(shard: int, shards: int, epoch: int) -> Any:
            own = split_dataset_by_node(stream(), shard, shards)
            own.set_epoch(epoch)
            return StatefulDataLoader(ResumableDataset(own), 2, num_workers=workers)

        self.stateful = ShardedLoader(make, shards=SHARDS)

    def batches(self, first: int) -> Batches:
        for batches in self.stateful:
            yield first, [one for batch in batches for one in ids(batch)]


KINDS: dict[str, Callable[[int], Any]] = {
    "torchdata": Torchdata,
    "streaming": Streaming,
    "alone": StreamAlone,
    "sharded": Sharded,
}
CASES = [
    (kind, workers) for kind in KINDS for workers in (0, 2, 4) if kind != "alone" or not workers
]


def train(kind: str, workers: int, start: int, draw: random.Random, notes: Path) -> None:
    """One rank of one start, which may end by a kill of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last = start + 1 == len(SIZES)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = KINDS[kind](workers)
    every = draw.choice([1, 2, 3])
    victim, moment = draw.randrange(size), draw.choice(["drawn", "noted", "saved"])
    with Checkpointer(
        model=model,
        optimizer=optimizer,
        stateful={"data": data.stateful},
        every_steps=every,
        every_seconds=3600,
        mode=draw.choice(["async", "blocking"]),
    ) as checkpointer:
        done = checkpointer.resume()
        if size == 3 and kind != "sharded":
            assert not done, "3 ranks go on from the positions of 2"
            return
        end = STEPS if last else min(STEPS - 1, done + draw.randint(1, 9))

        def reach(point: str) -> None:
            if not last and (step, rank, moment) == (end, victim, point):
                (notes / f"{start}-killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        with (notes / f"{start}-{rank}").open("w", buffering=1) as file:
            file.write(f"resumed {done}\n")
            first = checkpointer.state.get("epoch", 0)
            for step, (epoch, samples) in zip(
                range(done + 1, STEPS + 1), data.batches(first), strict=False
            ):
                checkpointer.state["epoch"] = epoch
                reach("drawn")
                dist.all_reduce(torch.ones(1))
                file.write(f"{step} {' '.join(map(str, samples))}\n")
                reach("noted")
                checkpointer.maybe_save(step)
                reach("saved")


def start_ranks(size: int, work: Callable[[], None], folder: Path, start: int) -> None:
    """Run `work` on this many ranks until all have ended, or one, which ends the others."""
    children = {}
    for rank in range(size):
        child = os.fork()
        if not child:
            code = 1
            try:
                os.setpgid(0, 0)
                os.environ |= {
                    "KDIST_CHECKPOINTS": str(folder / "checkpoints"),
                    "KDIST_RUN_ID": "run-1",
                    "KDIST_GENERATION": str(start + 1),
                    "RANK": str(rank),
                }
                dist.init_process_group(
                    "gloo",
                    store=FileStore(str(folder / f"store-{start}"), size),
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=60),
                )
                work()
                dist.barrier()
                code = 0
            except BaseException:  # noqa: BLE001 - the parent sees the code
                (folder / f"error-{start}-{rank}").write_text(traceback.format_exc())
            os._exit(code)
        children[child] = rank
    for _ in range(size):
        child, status = os.waitpid(-1, 0)
        del children[child]
        for other in children if status else ():
            with suppress(ProcessLookupError):
                os.killpg(other, signal.SIGKILL)
        if status:  # and its loader processes
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)


def run(kind: str, workers: int, seed: int, folder: Path) -> tuple[str, bool]:
    """What is wrong with the samples that counted, empty if each was read once in each epoch; and
    whether another number of ranks was refused.
    """
    notes = folder / "notes"
    notes.mkdir(parents=True)
    refused = False
    for start, size in enumerate(SIZES):
        draw = f"{seed}-{start}"
        start_ranks(
            size,
            partial(train, kind, workers, start, random.Random(draw), notes),
            folder,
            start,
        )
        if not (notes / f"{start}-killed").exists():
            errors = [one.read_text() for one in folder.glob(f"error-{start}-*")]
            expected = size == 3 and all(
                f"the job has {size} now: {NAMED}" in one for one in errors
            )
            assert expected or not errors, f"start {start}: {errors[0]}"
            refused |= expected and bool(errors)
    counted: Counter[int] = Counter()
    until = STEPS
    for start in reversed(range(len(SIZES))):
        found = [notes / f"{start}-{rank}" for rank in range(SIZES[start])]
        lines = [one.read_text().splitlines() for one in found if one.exists()]
        for line in (line for of_rank in lines for line in of_rank[1:]):
            step, *samples = map(int, line.split())
            if step <= until:
                counted.update(samples)
        until = min([until, *(int(of_rank[0].split()[1]) for of_rank in lines)])
    wrong = {number: counted[number] for number in range(SAMPLES) if counted[number] != EPOCHS}
    shown = ", ".join(f"{one} {times} times" for one, times in list(wrong.items())[:5])
    return (f"{len(wrong)} samples not read {EPOCHS} times: {shown}" if wrong else "", refused)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed = 0
    for kind, workers in CASES:
        if options.kind not in (None, kind) or options.workers not in (None, workers):
            continue
        problems, refusals = [], 0
        for seed in range(options.first, options.first + options.seeds):
            with tempfile.TemporaryDirectory(prefix="loaders-") as folder:
                found, refused = run(kind, workers, seed, Path(folder))
            refusals += refused
            if found:
                problems.append(f"seed {seed}: {found}")
        failed += len(problems)
        right = options.seeds - len(problems)
        row = f"{kind:10} workers {workers}: {right} of {options.seeds} exact, {refusals} refused"
        sys.stdout.write("\n  ".join([row, *problems]) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
