"""Saves a checkpoint with DCP: copies the state, writes the copy while training continues, and
commits on rank 0.

With `ddp` every rank holds the same tensors, so each rank copies and writes only its share, and
training pauses for 1/N of the time that one rank would need for all of them. The buffers are reused
from one save to the next.
"""

from __future__ import annotations

import heapq
import os
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.tensor import DTensor

from kdist_trainer import log
from kdist_trainer.checkpoint import commit, durable_files
from kdist_trainer.checkpoint.commit import (
    CommitRequest,
    SaveResult,
    cause_of,
    commit_checkpoint,
    discard,
)
from kdist_trainer.checkpoint.durable_files import Digest
from kdist_trainer.checkpoint.layout import CheckpointDirectory
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock, LockLostError
from kdist_trainer.checkpoint.peers import CheckpointGroup
from kdist_trainer.errors import classify

Paths = dict[str, tuple[str | int, ...]]


class Stager:
    """Copies this rank's share of a state into CPU memory that it owns."""

    def __init__(self, *, rank: int, size: int) -> None:
        """With `size` 1 the share is everything; `size` 0 means that this rank saves nothing."""
        self._rank = rank
        self._size = size
        self._buffers: dict[str, Any] = {}
        self._layout: dict[str, Any] = {}

    def stage(
        self, state: Mapping[str, Any], *, first: Collection[str] = ()
    ) -> tuple[dict[str, Any], Paths]:
        """Copy the share now; when this returns the state may change again.

        `first`: flat names of whole tensors in which ranks may differ: rank 0's are saved, all of
        one rank.

        Returns the copies by flat name (`model.fc.weight`), and for each the path of keys that
        leads to it. They stay valid until the next call. Raises `ValueError` for values that a
        checkpoint cannot hold.
        """
        if self._size == 0:
            return {}, {}
        flat, paths = flatten_state_dict(dict(state))
        share = {name: flat[name] for name in _share(flat, self._rank, self._size, first)}
        tensors = {name: value for name, value in share.items() if isinstance(value, Tensor)}
        layout = {name: (value.shape, value.dtype, value.device) for name, value in tensors.items()}
        on_gpu = any(value.is_cuda for value in tensors.values())
        with torch.no_grad():
            if layout != self._layout:
                self._buffers = _create_cpu_state_dict(tensors, pin_memory=on_gpu)
                self._layout = layout
            copies = _copy_state_dict(tensors, self._buffers, non_blocking=on_gpu)
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            copies |= {
                name: _copied(value, name) for name, value in share.items() if name not in tensors
            }
        return copies, {name: tuple(paths[name]) for name in share}


def _share(flat: Mapping[str, Any], rank: int, size: int, first: Collection[str] = ()) -> list[str]:
    """Names that this rank saves, in the state's order; every rank comes to the same division
    without asking.

    Whole tensors are dealt by size, the largest first, each to the rank that has least. Shards of a
    sharded tensor stay where they are; what is no tensor goes to rank 0, and so do those named in
    `first`.
    """
    load = [(0, one) for one in range(size)]
    owner = {name: 0 if not isinstance(value, DTensor) else rank for name, value in flat.items()}
    dealt = [
        name
        for name, value in flat.items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
    ]
    whole = [(flat[name].nbytes, name) for name in dealt if name not in first]
    for nbytes, name in sorted(whole, key=lambda one: (-one[0], one[1])):
        taken, lightest = heapq.heappop(load)
        owner[name] = lightest
        heapq.heappush(load, (taken + nbytes, lightest))
    return [name for name in flat if owner[name] == rank]


def _copied(value: Any, name: str) -> Any:
    """A copy of a value that is no tensor, limited to what the reader's `weights_only` will give
    back.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(_copied(one, name) for one in value)
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: _copied(one, name) for key, one in value.items()})
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise ValueError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: give "
        "numbers, texts or tensors"
    )


# Saving without a process group is what we ask for where one rank writes everything.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


class _DurableFileSystem(FileSystem):
    """DCP's view of the disk, through `files`: every stream is on the disk when it is closed, and
    its digest is known.

    DCP's own `sync_files` is off: it syncs `.metadata` before the bytes have left Python's buffer.
    """

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            raise ValueError(f"checkpoints are written once, not opened as {mode!r}")
        file = durable_files.DurableFile(Path(path))
        with file:
            yield file
        self.digests[file.path.name] = file.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        durable_files.rename(Path(path), Path(new_path))
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        durable_files.make_folder(Path(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        durable_files.remove(Path(path))


class _Writer(FileSystemWriter):
    """DCP's writer over that file system. What it notes of itself is the same for the same save,
    not a random number.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(
            path,
            single_file_per_rank=True,
            sync_files=False,
            thread_count=1,
            per_thread_copy_ahead=0,
        )
        self.fs = _DurableFileSystem()
        self.save_id = name

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.save_id, save_id=self.save_id)


class _Planner(DefaultSavePlanner):
    """Plans a flat share of a state, under the paths that the nested state had."""

    def __init__(self, paths: Paths) -> None:
        super().__init__()
        self._paths = paths

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.mappings = dict(self._paths)


class Writer:
    """Carries out saves; `write` may run on a thread of its own, one at a time. Collective over
    `peers`.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        *,
        peers: CheckpointGroup,
        lock: Lock,
        keep: int,
        shared: bool,
    ) -> None:
        self._directory = directory
        self._peers = peers
        self._lock = lock
        self._keep = keep
        self._shared = shared
        self._ledger = RunLedger(directory.root)
        self.acknowledged: SaveResult | None = None

    def write(self, request: CommitRequest, staged: dict[str, Any], paths: Paths) -> SaveResult:
        """Write and commit; a step that this group has committed already is not written again.

        Never raises `Exception`: what went wrong is in the result, which is the same on every rank.
        """
        if self.acknowledged is not None and self.acknowledged.step == request.manifest.step:
            return _timed(self.acknowledged, request)
        result: SaveResult | None = None
        try:
            digests = self._write_tensors(request, staged, paths)
            if self._peers.is_leader:
                result = self._commit(request, digests)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the failure is counted and the training goes on
            result = self._failed(request, error)
        try:
            agreed = self._peers.broadcast(result)
        except Exception as error:  # noqa: BLE001 - a peer is gone; the training is about to learn it in its own way
            agreed = result if result is not None else self._failed(request, error)
        assert agreed is not None  # noqa: S101 - rank 0 has committed or failed
        if agreed.ok:
            self.acknowledged = agreed
        return agreed

    def _write_tensors(
        self, request: CommitRequest, staged: dict[str, Any], paths: Paths
    ) -> dict[str, Digest]:
        """Let DCP write every rank's share. Returns the digests of all files, each taken by the
        rank that wrote it.
        """
        alone = self._peers.size == 1 or not self._shared
        if alone and not self._peers.is_leader:
            return {}
        writer = _Writer(request.temporary, request.manifest.name)
        planner = _Planner(paths)
        state_dict_saver.save(
            staged,
            storage_writer=writer,
            planner=planner,
            process_group=self._peers.group,
            no_dist=alone,
        )
        own = cast(_DurableFileSystem, writer.fs).digests
        shares = [own] if alone else self._peers.gather(own)
        return {name: digest for share in shares for name, digest in share.items()}

    def _commit(self, request: CommitRequest, digests: dict[str, Digest]) -> SaveResult:
        manifest = commit_checkpoint(self._directory, self._lock, request, digests)
        path = self._directory.root / manifest.name
        result = _timed(
            SaveResult(manifest.step, ok=True, nbytes=manifest.nbytes, path=path), request
        )
        self._note(result)
        commit.prune(self._directory, self._lock, keep=self._keep)
        return result

    def _note(self, result: SaveResult) -> None:
        seconds, visible = round(result.total_seconds, 4), round(result.visible_seconds, 4)
        try:
            self._ledger.append(
                "commit",
                step=result.step,
                seconds=seconds,
                visible_seconds=visible,
                bytes=result.nbytes,
            )
        except OSError as error:
            log.warn("ledger-write-failed", step=result.step, error=str(error))
        log.event(
            "checkpoint-committed",
            step=result.step,
            path=str(result.path),
            seconds=seconds,
            visible_seconds=visible,
            bytes=result.nbytes,
        )

    def _failed(self, request: CommitRequest, error: BaseException) -> SaveResult:
        root = _root_of(error)
        if self._peers.is_leader:
            try:
                # whoever takes over clears our files away, which looks like a failing disk
                self._lock.check()
            except (LockLostError, OSError) as lost:
                root = lost if isinstance(lost, LockLostError) else root
        told = f"{type(root).__name__}: {root}"
        echo = not classify(root)[2]
        result = _timed(
            SaveResult(
                request.manifest.step, ok=False, cause=cause_of(root), error=told, echo=echo
            ),
            request,
        )
        if self._peers.is_leader:
            discard(request)
            log.warn("checkpoint-failed", step=result.step, cause=result.cause, error=result.error)
        return result


def _timed(result: SaveResult, request: CommitRequest) -> SaveResult:
    total = time.monotonic() - request.started
    visible = total if request.visible_seconds is None else request.visible_seconds
    return replace(result, visible_seconds=visible, total_seconds=total)


def _root_of(error: BaseException) -> BaseException:
    """The error of the rank where it began, out of DCP's collection of all ranks' errors."""
    if isinstance(error, CheckpointException) and error.failures:
        errors = [wrapped[0] for wrapped in error.failures.values()]
        return next((one for one in errors if isinstance(one, OSError | LockLostError)), errors[0])
    return error
