"""Bring the samples of step after step to a rank: in the rank itself, or ahead of time in
processes.

Whatever a data set draws at random while it makes a sample follows from (seed, step, shard, chunk),
so the batches are the same with any number of loader processes and after any resume.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from kdist_trainer import config
from kdist_trainer.data.step_plan import Chunk, StepPlan
from kdist_trainer.rng import FETCH, derive, generators
from kdist_trainer.stream import StreamSamples
from kdist_trainer.workload import Samples, Workload


class MicroBatch(NamedTuple):
    """One forward pass with its samples."""

    shard: int
    chunk: int
    samples: int
    """0 for the stand-in of a rank without a sample, whose weight is 0 too."""
    weight: float
    batch: Any
    scant: bool = False
    """Too few samples for a batch norm."""


class Batch(NamedTuple):
    """This rank's part of one step."""

    first: int
    """Position of the step's first sample in the stream."""
    samples: int
    """Samples in the step, over all ranks."""
    pieces: list[MicroBatch]

    @property
    def own_samples(self) -> int:
        """Samples of this rank."""
        return sum([piece.samples for piece in self.pieces])


Fetch = Callable[[Tensor, int], Any]
"""(indices of samples, seed) -> batch."""


def fetcher(workload: Workload, samples: Samples) -> Fetch:
    """The fastest way to take a batch from these samples: one index where they are tensors, else
    one sample at a time.
    """
    if isinstance(samples, TensorDataset) and type(workload).collate is Workload.collate:
        tensors = samples.tensors
        return lambda indices, _: [tensor.index_select(0, indices) for tensor in tensors]
    set_generators = generators(torch.device("cpu"))
    whole = getattr(samples, "fetch", None)

    def fetch(indices: Tensor, seed: int) -> Any:
        set_generators(seed)
        if whole is not None:
            return whole(indices)
        return workload.collate([samples[index] for index in indices.tolist()])

    return fetch


class Loader:
    """The batches of one rank from any step on."""

    def __init__(
        self,
        steps: StepPlan,
        workload: Workload,
        samples: Samples,
        *,
        settings: config.LoaderConfig,
        seed: int,
    ) -> None:
        self._steps = steps
        self._workload = workload
        self._samples = samples
        self._settings = settings
        self._seed = seed
        if settings.workers:
            _ready_server()
        device = workload.context.device
        self._ahead: Any = None
        self._move: Callable[[Any], Any] | None = (
            None if device.type == "cpu" else workload.to_device
        )

    def sample(self) -> MicroBatch:
        """This rank's first piece of the run, fetched here and now: something to warm up with."""
        return self._moved(
            _fetched(
                _request(self._steps, self._steps.parts(0)[0], 0, 0, self._seed), self._fetcher()
            )
        )

    def go_on(self, *, step: int, position: int) -> int:
        """Go on after `step` steps that used `position` samples; returns the run's last step."""
        return self._steps.go_on(step=step, position=position)

    def past_end(self, *, step: int, position: int) -> str:
        """What the run asks for, if more than that has been done; else empty."""
        return self._steps.past_end(step=step, position=position)

    def size(self, position: int) -> int:
        """Samples, over all ranks, of the step that begins at `position`."""
        return self._steps.size(position)

    def waiting(self) -> int | None:
        """Pieces that loader processes have ready; None where there are none, or where the system
        cannot count them.
        """
        try:
            return int(self._ahead._data_queue.qsize())  # torch has no public word for it
        except (AttributeError, NotImplementedError):
            return None

    def batches(self, *, step: int, position: int) -> Iterator[Batch]:
        """Every step's batch, after `step` steps and `position` samples."""
        steps, seed, take = self._steps, self._seed, self._take(step, position)
        while position < steps.total:
            pieces = [
                take(_request(steps, part, step, position, seed)) for part in steps.parts(position)
            ]
            size = steps.size(position)
            yield Batch(position, size, pieces)
            step, position = step + 1, position + size

    def _take(self, step: int, position: int) -> Callable[[_Request], MicroBatch]:
        """What answers the requests from this step on, in their order."""
        if self._settings.workers:
            ahead = iter(
                self._processes(
                    _Requests(self._steps, seed=self._seed, step=step, position=position)
                )
            )
            self._ahead = ahead
            return lambda _: self._moved(next(ahead))
        fetch = self._fetcher()
        if self._move is None:
            return lambda request: _fetched(request, fetch)
        return lambda request: self._moved(_fetched(request, fetch))

    def _processes(self, requests: _Requests) -> DataLoader[MicroBatch]:
        return DataLoader(
            _Pieces(self._workload, self._samples),
            batch_size=None,
            sampler=requests,  # torch speaks of indices, and passes on whatever it is given
            num_workers=self._processes_of_use(),
            prefetch_factor=self._settings.prefetch,
            collate_fn=_unchanged,  # type: ignore[arg-type]  # without a batch size it is handed single items
            pin_memory=self._move is not None,
            multiprocessing_context="forkserver",
            worker_init_fn=end_with_the_rank,
        )

    def _processes_of_use(self) -> int:
        """So many processes that each piece of a step comes from the same one every time, where a
        shard is read in its order.

        Requests go to them in turn: otherwise every process would read all that the others read, to
        pass it over.
        """
        most, pieces = self._settings.workers, len(self._steps.parts(0))
        if not isinstance(self._samples, StreamSamples):
            return most
        return max(count for count in range(1, most + 1) if pieces % count == 0)

    def _fetcher(self) -> Fetch:
        return fetcher(self._workload, self._samples)

    def _moved(self, piece: MicroBatch) -> MicroBatch:
        return piece if self._move is None else piece._replace(batch=self._move(piece.batch))


class _Request(NamedTuple):
    """One piece to fetch: whose it is, which samples, and what decides all that is drawn while they
    are made.
    """

    part: Chunk
    indices: Tensor
    seed: int


def _request(steps: StepPlan, part: Chunk, step: int, position: int, seed: int) -> _Request:
    indices = steps.order.between(position + part.first, position + part.last)
    return _Request(part, indices, derive(seed, FETCH, step, part.shard, part.chunk))


def _fetched(request: _Request, fetch: Fetch) -> MicroBatch:
    part, indices, seed = request
    return MicroBatch(
        part.shard, part.chunk, part.samples, part.weight, fetch(indices, seed), part.scant
    )


class _Requests:
    """All of a rank's requests from one position on, in order; no batch waits for them to be
    made.
    """

    def __init__(self, steps: StepPlan, *, seed: int, step: int, position: int) -> None:
        self._steps = steps
        self._seed = seed
        self._step = step
        self._position = position

    def __iter__(self) -> Iterator[_Request]:
        steps, step, position = self._steps, self._step, self._position
        while position < steps.total:
            for part in steps.parts(position):
                yield _request(steps, part, step, position, self._seed)
            step, position = step + 1, position + steps.size(position)


class _Pieces(Dataset[MicroBatch]):
    """What a loader process works on: a request is answered by its piece."""

    def __init__(self, workload: Workload, samples: Samples) -> None:
        self._workload = workload
        self._samples = samples
        self._fetch: Fetch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """What a loader process makes of it: first the rank's environment is its own, then the
        user's code is imported.
        """
        return _pieces_with, (_Environment(dict(os.environ)), self._workload, self._samples)

    def __getitem__(self, request: _Request) -> MicroBatch:
        if self._fetch is None:  # made here, because closures do not travel to another process
            self._fetch = fetcher(self._workload, self._samples)
        return _fetched(request, self._fetch)


class _Environment:
    """An environment that takes effect where it is unpickled: the server's own is that of the
    agent.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def __reduce__(self) -> tuple[Any, ...]:
        return _take_environment, (self._variables,)


def _take_environment(variables: dict[str, str]) -> _Environment:
    os.environ.clear()
    os.environ.update(variables)
    return _Environment(variables)


def _pieces_with(_: _Environment, workload: Workload, samples: Samples) -> _Pieces:
    return _Pieces(workload, samples)


def end_with_the_rank(_: int) -> None:
    """Let a loader process end when its rank does, though it be killed: torch looks at the parent,
    which is the server.
    """
    if rank := multiprocessing.parent_process():
        # a rank that an agent started leads a group, which is killed as one
        with contextlib.suppress(OSError):
            os.setpgid(0, rank.pid or 0)
        threading.Thread(target=_follow, args=(rank.join,), daemon=True).start()


def _follow(wait: Callable[[], object]) -> None:
    wait()
    os._exit(1)


def _ready_server() -> None:
    """Have a server that loader processes are forked from: the one this rank came from, which has
    imported everything.

    A fork of the rank itself would copy gloo's threads half-way. Where nobody forked this rank a
    server of its own starts now, and imports torch while the rank does other things.
    """
    server: Any = forkserver._forkserver
    if _comes_from(server):
        # it is not this process's child, to be waited for
        server.ensure_running = resource_tracker.ensure_running
        return
    multiprocessing.set_forkserver_preload(["torch.utils.data", __name__])
    forkserver.ensure_running()


def _comes_from(server: Any) -> bool:
    """Whether this process was forked by a server that takes its requests: a fork knows the
    address, and has no such child.
    """
    known = (
        server._forkserver_pid is None
        and server._forkserver_address
        and server._forkserver_alive_fd is not None
    )
    return bool(known and getattr(server, "_forkserver_authkey", b"none is asked for") is not None)


def _unchanged(piece: MicroBatch) -> MicroBatch:
    return piece
