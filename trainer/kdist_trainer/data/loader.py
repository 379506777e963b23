"""Loads a rank's batches: in the rank itself, or ahead of time in loader processes.

Whatever a data set draws at random while it makes a sample follows from (seed, step, shard, chunk),
so the batches are the same with any number of loader processes and after any resume.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from kdist_trainer import config, torch_internals
from kdist_trainer.data.step_plan import Chunk, StepPlan
from kdist_trainer.numerics.rng import FETCH, Generators, derive
from kdist_trainer.processes.signals import leave_stops_to_others
from kdist_trainer.processes.threads import OnError, start_thread
from kdist_trainer.stream import Stream, StreamSamples
from kdist_trainer.workload import Samples, Workload


class MicroBatch(NamedTuple):
    """The samples of one forward pass."""

    shard: int
    chunk: int
    """Number of the micro-batch within the shard."""
    samples: int
    """0 for the stand-in of a rank without a sample, whose weight is 0 too."""
    weight: float
    batch: Any
    """What `Workload.collate` returned, on the rank's device."""
    too_small: bool = False
    """Too few samples for batch statistics."""


class Batch(NamedTuple):
    """This rank's part of one step."""

    first: int
    """Position of the step's first sample in the stream."""
    samples: int
    """Samples in the step, over all ranks."""
    micro_batches: list[MicroBatch]

    @property
    def own_samples(self) -> int:
        return sum([micro_batch.samples for micro_batch in self.micro_batches])


Fetch = Callable[[Tensor, int], Any]
"""From the indices of samples (int64, shape (samples,)) and a seed to a batch."""


def fetcher(workload: Workload, samples: Samples) -> Fetch:
    """The fastest function that fetches a batch: one `index_select` if the samples are tensors, the
    data set's own `fetch`, or one sample at a time.
    """
    if isinstance(samples, TensorDataset) and type(workload).collate is Workload.collate:
        tensors = samples.tensors
        return lambda indices, _: [tensor.index_select(0, indices) for tensor in tensors]
    generators = Generators.all(torch.device("cpu"))
    fetch_all = getattr(samples, "fetch", None)

    seek = samples.seek if isinstance(samples, StreamSamples) else None

    def fetch(indices: Tensor, seed: int) -> Any:
        if seek is not None and len(indices):  # before: a resume reads what is skipped
            seek(int(indices[0]))
        generators.seed(seed)
        if fetch_all is not None:
            return fetch_all(indices)
        return workload.collate([samples[index] for index in indices.tolist()])

    return fetch


class Loader:
    """The batches of one rank, from any step on."""

    def __init__(
        self,
        steps: StepPlan,
        workload: Workload,
        samples: Samples,
        *,
        settings: config.LoaderConfig,
        seed: int,
    ) -> None:
        """Load nothing yet."""
        self.steps = steps
        self._workload = workload
        self._samples = samples
        self._settings = settings
        self._seed = seed
        if settings.workers:
            _prepare_forkserver()
        device = workload.context.device
        self._prefetching: Any = None
        """torch's iterator over the batches of the loader processes, which end with it: nothing
        else refers to it.
        """
        self._to_device: Callable[[Any], Any] | None = (
            None if device.type == "cpu" else workload.to_device
        )

    @property
    def opened(self) -> Samples | Stream:
        return self._samples.stream if isinstance(self._samples, StreamSamples) else self._samples

    def first_micro_batch(self) -> MicroBatch:
        """This rank's first micro-batch of the run, fetched in this process, for the warm-up."""
        request = _make_request(self.steps, self.steps.chunks(0)[0], 0, 0, self._seed)
        return self._move(_fetch(request, self._fetcher()))

    def prefetched(self) -> int | None:
        """Micro-batches that loader processes have ready; None without such processes, or where the
        system cannot count them.
        """
        return torch_internals.queued_batches(self._prefetching)

    def close(self) -> None:
        """End the loader processes, if any; `batches` starts new ones."""
        workers = torch_internals.workers_of(self._prefetching)
        self._prefetching = None  # torch asks them to end, and waits some seconds
        for worker in workers:
            worker.kill()  # one that hangs in the user's code; SIGTERM does not end it

    def batches(self, *, step: int, position: int) -> Iterator[Batch]:
        """The batch of every step, after `step` steps and `position` samples. It ends the loader
        processes of an earlier iterator, which must not be used any more.
        """
        steps, fetch = self.steps, self._fetch_from(step, position)
        while position < steps.total:
            size = steps.step_size(position)
            chunks = steps.chunks_of(size)
            yield Batch(position, size, [fetch(chunk, step, position) for chunk in chunks])
            step, position = step + 1, position + size

    def _fetch_from(self, step: int, position: int) -> Callable[[Chunk, int, int], MicroBatch]:
        """The function that fetches the micro-batches from this step on, in their order: from the
        chunk, and the number and the position of its step.
        """
        if self._settings.workers:
            self.close()
            loader: DataLoader[MicroBatch] = DataLoader(
                _RequestedSamples(self._workload, self._samples),
                batch_size=None,
                # torch passes each item on to the data set as if it were an index
                sampler=_requests(self.steps, self._seed, step, position),
                num_workers=self._useful_processes(),
                prefetch_factor=self._settings.prefetch,
                collate_fn=_unchanged,  # type: ignore[arg-type]  # without a batch size it gets single items
                pin_memory=self._to_device is not None,
                multiprocessing_context="forkserver",
                worker_init_fn=exit_with_rank,
            )
            self._prefetching = iter(loader)
            return lambda *_: self._move(next(self._prefetching))
        order, seed, fetch = self.steps.order, self._seed, self._fetcher()
        to_device = self._to_device

        # Without a request in between, which only loader processes need: each call here is paid
        # for in every step.
        def fetch_chunk(chunk: Chunk, step: int, position: int) -> MicroBatch:
            shard, number, first, last, samples, weight, too_small = chunk
            indices = order.between(position + first, position + last)
            batch = fetch(indices, derive(seed, FETCH, step, shard, number))
            if to_device is not None:
                batch = to_device(batch)
            return MicroBatch(shard, number, samples, weight, batch, too_small)

        return fetch_chunk

    def _useful_processes(self) -> int:
        """Number of loader processes. For a stream, each micro-batch of a step must come from the
        same process every time.

        torch assigns requests to processes in turn: otherwise every process would have to read the
        samples of all others to skip them.
        """
        most, chunks = self._settings.workers, len(self.steps.chunks(0))
        if not isinstance(self._samples, StreamSamples):
            return most
        return max(count for count in range(1, most + 1) if chunks % count == 0)

    def _fetcher(self) -> Fetch:
        return fetcher(self._workload, self._samples)

    def _move(self, micro_batch: MicroBatch) -> MicroBatch:
        if self._to_device is None:
            return micro_batch
        return micro_batch._replace(batch=self._to_device(micro_batch.batch))


class _Request(NamedTuple):
    """A micro-batch to fetch: its samples, and the seed of all random draws in making them."""

    chunk: Chunk
    indices: Tensor
    """int64, shape (samples,)"""
    seed: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the indices as bytes: of a tensor, a loader process would get a descriptor, which
        this process keeps open for it, for ever if the loader process ends without asking for it.
        """
        return _unpickle_request, (self.chunk, self.indices.numpy(), self.seed)


def _unpickle_request(chunk: Chunk, indices: Any, seed: int) -> _Request:
    return _Request(chunk, torch.from_numpy(indices), seed)


def _requests(steps: StepPlan, seed: int, step: int, position: int) -> Iterator[_Request]:
    """All requests of a rank from one position on, in order."""
    while position < steps.total:
        for chunk in steps.chunks(position):
            yield _make_request(steps, chunk, step, position, seed)
        step, position = step + 1, position + steps.step_size(position)


def _make_request(steps: StepPlan, chunk: Chunk, step: int, position: int, seed: int) -> _Request:
    indices = steps.order.between(position + chunk.first, position + chunk.last)
    return _Request(chunk, indices, derive(seed, FETCH, step, chunk.shard, chunk.chunk))


def _fetch(request: _Request, fetch: Fetch) -> MicroBatch:
    shard, number, _, _, samples, weight, too_small = request.chunk
    batch = fetch(request.indices, request.seed)
    return MicroBatch(shard, number, samples, weight, batch, too_small)


class _RequestedSamples(Dataset[MicroBatch]):
    """The data set of a loader process: maps a request to its micro-batch."""

    def __init__(self, workload: Workload, samples: Samples) -> None:
        self._workload = workload
        self._samples = samples
        self._fetch: Fetch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickle the environment first: a loader process takes over the rank's environment before
        it imports the user's code.
        """
        return _requested_samples, (_Environment(os.environ), self._workload, self._samples)

    def __getitem__(self, request: _Request) -> MicroBatch:
        if self._fetch is None:  # made here, because closures cannot be pickled
            self._fetch = fetcher(self._workload, self._samples)
        return _fetch(request, self._fetch)


class _Environment(dict[str, str]):
    """Environment variables that are set when they are unpickled: the forkserver's own are those of
    the agent.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _set_environment, (dict(self),)


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _requested_samples(_: None, workload: Workload, samples: Samples) -> _RequestedSamples:
    return _RequestedSamples(workload, samples)


def exit_with_rank(_: int) -> None:
    """Make a loader process exit when its rank does, even if it is killed: torch only watches the
    parent process, which is the forkserver. Until then the rank needs it, also to save at SIGTERM.
    """
    leave_stops_to_others()
    if rank := multiprocessing.parent_process():
        # a rank that an agent started leads a process group, which is killed as one
        with contextlib.suppress(OSError):
            os.setpgid(0, rank.pid or 0)
        start_thread(partial(_exit_after, rank.join), name="rank-watch", on_error=OnError.EXIT)


def _exit_after(wait: Callable[[], object]) -> None:
    wait()
    os._exit(1)


def _prepare_forkserver() -> None:
    """Prepare the forkserver of the loader processes: the rank's own, if it was started with the
    rank, or the one that forked this rank. Both have imported torch.

    A fork of the rank itself would copy gloo's threads in an inconsistent state. If there is
    neither, a server starts now, and imports torch while the rank continues.
    """
    server: Any = forkserver._forkserver
    # A forkserver that forked this process is known by its address but is no child of it.
    inherited = (
        server._forkserver_pid is None
        and server._forkserver_address
        and server._forkserver_alive_fd is not None
    )
    if inherited and getattr(server, "_forkserver_authkey", b"not required") is not None:
        # it is not a child of this process, which therefore cannot wait for it
        server.ensure_running = resource_tracker.ensure_running
        return
    multiprocessing.set_forkserver_preload(["torch.utils.data", __name__])
    forkserver.ensure_running()


def _unchanged(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch
