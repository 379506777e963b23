"""Writes the state of a training with DCP while the training continues, and commits it on rank 0.

A rank's share is first copied into CPU memory, so that the training may change the state while the
copy is written. With `ddp` every rank holds the same tensors, so each rank copies and writes only
its share, and training pauses for 1/N of the time that one rank would need for all of them. The
buffers are reused from one save to the next. DCP writes to kdist's storage: every file is durable
when it is closed, with a digest of what was written.

Before the first checkpoint of a run, or of a new shape of its state, is acknowledged, it is proven
that a new process could load it. In memory, what a new process would have is built by whoever
trains, and the state is loaded into it (`LoadableCheck.prove`). On the disk, every name, kind,
shape and type is compared with what was to be saved, and values other than tensors are read as a
new process would.

A `CarriedSave` is one that a rank continues alone when its group has broken; it is committed once
the rank is a member of the next group.
"""

from __future__ import annotations

import heapq
import io
import os
import time
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config as serialization

from kdist_trainer import log
from kdist_trainer.checkpoint import commit, reader, storage, torch_internals
from kdist_trainer.checkpoint.commit import (
    DROPPED,
    CommitRequest,
    Membership,
    SaveDroppedError,
    SaveResult,
    UnsettledCommitError,
    cause_of,
    commit_checkpoint,
    discard,
    record_cut,
)
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock, LockLostError, LockRecord
from kdist_trainer.checkpoint.manifest import (
    MANIFEST,
    CheckpointDirectory,
    DamagedCheckpointError,
    Manifest,
    UnloadableStateError,
    read_raw_manifest,
)
from kdist_trainer.checkpoint.reader import check_tensor, copy_value, describe_index, read_value
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.checkpoint.torch_internals import KeyPath
from kdist_trainer.config import Checkpointing
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup
from kdist_trainer.errors import classify
from kdist_trainer.formats.digest import Digest
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.processes.threads import BackgroundTask
from kdist_trainer.state import ValueKind, find_differences, kind_of

Paths = dict[str, KeyPath]
"""By flat name, the keys that lead to a value."""


class Stager:
    """Copies this rank's share of a state into CPU memory that it owns."""

    def __init__(self, *, rank: int, size: int) -> None:
        """Save share `rank` of `size`: all of the state if `size` is 1, nothing if it is 0."""
        self._rank = rank
        self._size = size
        self._buffers: dict[str, Any] = {}
        self._layout: dict[str, Any] = {}

    def stage(
        self, state: Mapping[str, Any], *, first: Collection[str] = ()
    ) -> tuple[dict[str, Any], Paths]:
        """Copy the share of the nested state now; when this returns the state may change again.
        `first` has flat names of whole tensors that differ between ranks and are saved from rank 0.
        Raises `UnloadableStateError` if a checkpoint cannot hold a value of this type.

        Returns:
            The copies by flat name (`model.fc.weight`), valid until the next call, and for each the
            path of keys that leads to it.
        """
        if self._size == 0:
            return {}, {}
        flat, paths = torch_internals.flatten(state)
        for name, value in flat.items():
            if isinstance(value, Tensor):
                check_tensor(value, name)
        share = {name: flat[name] for name in _share(flat, self._rank, self._size, first)}
        tensors = {name: value for name, value in share.items() if isinstance(value, Tensor)}
        layout = {name: (value.shape, value.dtype, value.device) for name, value in tensors.items()}
        on_gpu = any(value.is_cuda for value in tensors.values())
        with torch.no_grad():
            if layout != self._layout:
                self._buffers = torch_internals.allocate_on_cpu(tensors, pin_memory=on_gpu)
                self._layout = layout
            copies = torch_internals.copy_to_cpu(tensors, self._buffers, non_blocking=on_gpu)
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            copies |= {
                name: copy_value(value, name)
                for name, value in share.items()
                if name not in tensors
            }
        return copies, {name: paths[name] for name in share}


def _share(flat: Mapping[str, Any], rank: int, size: int, first: Collection[str] = ()) -> list[str]:
    """Names that this rank saves, in the state's order; every rank computes the same division.

    Whole tensors are assigned by size, the largest first, each to the rank with the fewest bytes.
    Shards of a sharded tensor stay on their ranks. Values other than tensors, and the tensors in
    `first`, go to rank 0.
    """
    load = [(0, one) for one in range(size)]
    owner = {name: 0 if not isinstance(value, DTensor) else rank for name, value in flat.items()}
    whole = [
        name
        for name, value in flat.items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
    ]
    sizes = [(flat[name].nbytes, name) for name in whole if name not in first]
    for nbytes, name in sorted(sizes, key=lambda one: (-one[0], one[1])):
        assigned, lightest = heapq.heappop(load)
        owner[name] = lightest
        heapq.heappush(load, (assigned + nbytes, lightest))
    return [name for name in flat if owner[name] == rank]


# Where one rank writes everything, DCP saves without a process group on purpose.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


class _DurableFileSystem(FileSystem):
    """DCP's access to the disk: every stream is on the disk when it is closed, and has a digest.

    It replaces DCP's `sync_files`, which syncs `.metadata` before Python's buffer is flushed.
    """

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            raise ValueError(f"checkpoints are written once, not opened as {mode!r}")
        path = path if isinstance(path, ObjectPath) else Path(path)
        file = storage.create(path)
        with file:
            yield file
        self.digests[path.name] = file.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        storage.rename(Path(path), Path(new_path))
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        storage.make_folder(Path(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        storage.remove(Path(path))


class _ObjectFileSystem(_DurableFileSystem):
    """DCP's access to an object store: every stream is a whole object when it is closed. Its index
    gets its own name at once, since nothing can be renamed.
    """

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix.removesuffix(".tmp")

    def exists(self, path: Any) -> bool:  # noqa: ARG002 - DCP's signature
        return False  # a folder is written to once

    def mkdir(self, path: Any) -> None:
        """Do nothing: there are no folders."""

    def rename(self, path: Any, new_path: Any) -> None:
        """Do nothing: it has that name already."""


class DcpWriter(FileSystemWriter):
    """DCP's writer over that file system, with the checkpoint's name as its id instead of a random
    number.
    """

    def __init__(self, path: StoragePath, name: str) -> None:
        super().__init__(
            path if isinstance(path, Path) else Path(),
            single_file_per_rank=True,
            sync_files=False,
            thread_count=1,
            per_thread_copy_ahead=0,
        )
        self.fs: _DurableFileSystem = _DurableFileSystem()
        if not isinstance(path, Path):
            self.fs, self.path = _ObjectFileSystem(), cast(Any, path)
        self.save_id = name

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.save_id, save_id=self.save_id)


class DcpPlanner(DefaultSavePlanner):
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
        # flat already; DCP would take dicts apart whose keys are no texts, and make texts of them
        self.flatten_state_dict = False
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.flatten_state_dict = True  # so that the plan has the paths
        self.mappings = dict(self._paths)


Description = dict[str, ValueKind]
"""What every value of a state is, by flat name; values that are no tensors are all alike."""
Proof = Callable[[Mapping[str, Any], Description], Sequence[str]]
"""Loads a nested state into what a new process would have; returns what is wrong, with its path.
It may take as long as a start.
"""

_VALUE = ValueKind("value")
_MOST_SHOWN = 5


def describe_saved(state: Mapping[str, Any]) -> Description:
    """What a checkpoint of a nested state must have."""
    flat, _ = torch_internals.flatten(state)
    return {
        name: kind_of(value) if isinstance(value, Tensor) else _VALUE
        for name, value in flat.items()
    }


class LoadableCheck:
    """Has each shape of the state proven once, on this rank."""

    def __init__(self) -> None:
        self.prove: Proof | None = None
        self._proven: dict[str, Any] | None = None
        """The shape that is known to be loadable."""
        self._is_read_back = False
        """Whether a checkpoint of it was read back from the disk."""

    def check(self, state: Mapping[str, Any]) -> Description | None:
        """Prove that a new process can load a state, unless one of the same shape is proven.
        Returns what must be compared with what is on the disk; None if that was done before. Raises
        `UnloadableStateError` if a new process could not load it.
        """
        shape = _shape_of(state)
        if shape != self._proven:
            described = describe_saved(state)
            problems = self.prove(state, described) if self.prove is not None else ()
            if problems:
                raise UnloadableStateError(
                    "a new process could not load this state, so that no checkpoint of it would "
                    f"count: {_shorten(problems)}. What training adds must be there before a state "
                    "is loaded (made by model() and optimizer(), or before resume() in a script), "
                    "or be left out of state_dict()"
                )
            self._proven, self._is_read_back = shape, False
        return None if self._is_read_back else describe_saved(state)

    def confirm(self) -> None:
        """Note that a checkpoint of the present shape was read back, or loaded."""
        self._is_read_back = True

    def accept(self, state: Mapping[str, Any]) -> None:
        """Note that this state was loaded from a checkpoint."""
        self.accept_received(state)
        self.confirm()

    def accept_received(self, state: Mapping[str, Any]) -> None:
        """Note that this process has loaded this state from another rank's memory. No checkpoint of
        it need have been read.
        """
        self._proven = _shape_of(state)


def _shape_of(state: Mapping[str, Any]) -> dict[str, Any]:
    flat, _ = torch_internals.flatten(state)
    return {
        name: (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)
        for name, value in flat.items()
    }


def check_saved(
    folder: StoragePath, manifest: Manifest, described: Sequence[Description | None]
) -> None:
    """Read a checkpoint back that is written and not yet committed. `described` is what must be
    there, by rank; None from a rank that has it proven.

    Raises:
        UnloadableStateError: it is not what a new process would ask for.
        OSError: the disk failed.
    """
    demanded = {name: kind for one in described if one is not None for name, kind in one.items()}
    try:
        index = reader.read_index(folder, manifest)
        saved = describe_index(index)
        if any(one is None for one in described):
            saved = {name: kind for name, kind in saved.items() if name in demanded}
        problems = find_differences(demanded, saved)
        if problems:
            raise UnloadableStateError(
                f"what was written is not what a new process asks for: {_shorten(problems)}"
            )
        reader.read_values(folder, manifest, index)
    except DamagedCheckpointError as error:
        raise UnloadableStateError(f"what was written cannot be read back: {error}") from None


def round_trip(value: Any, path: str) -> Any:
    """A value as a new process would read it. Raises `UnloadableStateError`."""
    stream = io.BytesIO()
    try:
        torch.save(copy_value(value, path), stream)
        stream.seek(0)
        return read_value(stream)
    except UnloadableStateError:
        raise
    except Exception as error:
        # what torch cannot write or read, whatever it raises
        raise UnloadableStateError(
            f"{path} cannot be read back: {type(error).__name__}: {error}"
        ) from error


def fill(template: dict[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Fill a template with the values of a nested state, as a checkpoint would. Returns what the
    template lacks or has besides, with its path; nothing is filled then.
    """
    flat, _ = torch_internals.flatten(state)
    own, paths = torch_internals.flatten(template)
    if problems := reader.find_misfits(reader.shapes_of(own), reader.shapes_of(flat)):
        return problems
    with torch.no_grad():
        for name, value in flat.items():
            if isinstance(value, Tensor):
                if not value.is_meta and not own[name].is_meta:
                    own[name].copy_(value)
            else:
                torch_internals.set_value(template, paths[name], round_trip(value, name))
    return []


def _shorten(problems: Sequence[str]) -> str:
    rest = len(problems) - _MOST_SHOWN
    return "; ".join(problems[:_MOST_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


Content = Callable[[], dict[str, Digest]]
"""Writes this rank's files to the temporary folder, synced, and returns the digests of all ranks'
files. Collective.
"""


class Writer:
    """Writes and commits checkpoints, one at a time, on any thread. Collective over `group`."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        *,
        group: CheckpointGroup,
        lock: Lock,
        config: Checkpointing,
        shared: bool,
        spared: Collection[str] = (),
        is_carried: bool = False,
    ) -> None:
        """With `is_carried` it writes all of a state on one rank, and commits it once that is a
        member of a group: rank 0 keeps the folder clean, and others may save a later step
        meanwhile.
        """
        self.bounds_events = not is_carried
        """Whether it keeps the run's events few."""
        self._is_carried = is_carried
        self._directory = directory
        self._group = group
        self._lock = lock
        self._kept: Any = {"keep": config.keep, "apart": config.seconds_apart}
        self._shared = shared
        self._ledger = RunLedger(directory.root)
        self._spared = spared
        self.acknowledged: SaveResult | None = None
        self.membership = Membership()
        """Of the save in progress."""
        self.is_writing = False
        """Whether this rank writes its files: they may take as long as the storage likes, and
        without all other ranks there will be no checkpoint of them.
        """
        self.needs_nobody = False
        """Whether this rank can commit the save in progress without the others: it is rank 0, and
        all files are written, or it writes all of them.
        """
        self._attempts: list[CommitRequest] = []
        """Of the save in progress, as they were to be committed."""
        self._is_cleaned = is_carried

    def begin(self) -> None:
        """A save begins, to be committed under the lock that is held now; called before its thread
        is started.
        """
        self.membership = Membership()
        self.membership.set(self._lock.mine)
        self._attempts, self.needs_nobody = [], self._writes_alone and self._group.is_rank_zero

    def commit(self, request: CommitRequest, content: Content) -> SaveResult:
        """Commit a checkpoint of the request and of what `content`, called on every rank, writes,
        unless this worker group has already committed its step. Returns the result, the same on
        every rank, also of a save that failed; unless it failed since a rank is lost.
        """
        if self.acknowledged is not None and self.acknowledged.step == request.manifest.step:
            return _timed(self.acknowledged, request)
        result: SaveResult | None = None
        try:
            if self._group.is_rank_zero and not self._is_cleaned:
                # of groups that were killed between a commit and what it removes, and in an object
                # store cut saves, of which a folder on a disk is rid when it is locked
                if not isinstance(self._directory.root, Path):
                    before = request.manifest.epoch
                    commit.clean_stale(self._directory, before=before, spared=self._spared)
                commit.prune(self._directory, self._lock, **self._kept)
                self._is_cleaned = True
            digests = content()
            if self._group.is_rank_zero:
                result = self._commit(request, digests)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - a failed save is counted and the training continues
            result = self._failed(request, error)
            if result.secondary:
                # The group is broken. Others may still be in the collective that has raised here:
                # another one would look like ranks that differ, which ends a job for good.
                return result
        try:
            agreed = self._group.broadcast(result)
        except Exception as error:  # noqa: BLE001 - another rank is gone, which the training will find out itself
            agreed = result if result is not None else self._failed(request, error)
        assert agreed is not None  # noqa: S101 - rank 0 has committed or failed
        if agreed.ok:
            self.acknowledged = agreed
            if self._group.is_rank_zero:
                commit.prune(self._directory, self._lock, **self._kept)
        return agreed

    def write_tensors(
        self,
        request: CommitRequest,
        staged: dict[str, Any],
        paths: Paths,
        described: Description | None,
    ) -> dict[str, Digest]:
        """Have DCP write every rank's share, `staged` by flat name with the `paths` of keys, and
        read it back: `described` is what must be found then, None if a checkpoint of this shape was
        read back before. Returns the digests of all files, computed by their writers.
        """
        alone = self._writes_alone
        if alone and not self._group.is_rank_zero:
            return {}
        writer = DcpWriter(request.temporary, request.manifest.name)
        planner = DcpPlanner(paths)
        self.is_writing = True
        try:
            # no checksum of each tensor, which nothing would ever compare: the file has a digest
            with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # not in its stubs
                state_dict_saver.save(
                    staged,
                    storage_writer=writer,
                    planner=planner,
                    process_group=self._group.process_group,
                    no_dist=alone,
                )
        finally:
            self.is_writing = False
        own = (writer.fs.digests, described)
        shares = [own] if alone else self._group.gather(own)
        digests = {name: digest for share, _ in shares for name, digest in share.items()}
        expected = [one for _, one in shares]
        self.needs_nobody = self._group.is_rank_zero
        if self._group.is_rank_zero and any(one is not None for one in expected):
            # not under its name yet
            manifest = replace(request.manifest, files=digests)
            check_saved(request.temporary, manifest, expected)
        return digests

    @property
    def _writes_alone(self) -> bool:
        """Whether rank 0 writes all files."""
        return self._group.size == 1 or not self._shared

    def _commit(self, request: CommitRequest, digests: dict[str, Digest]) -> SaveResult:
        """Commit under the lock of the group that this rank is a member of, and if it has left that
        one meanwhile, under that of its next one.
        """
        if not self._is_carried and self._lock.mine is None:
            self._lock.check()  # a later group has it
        while True:
            record = self.membership.begin_commit()
            result: SaveResult | None = None
            try:
                result = self._commit_as(record, request, digests)
            except LockLostError:
                if not self.membership.has_left(record):
                    raise
            finally:
                self.membership.end_commit(is_committed=result is not None)
            if result is not None:
                self._record(result)
                return result

    def _commit_as(
        self, record: LockRecord, request: CommitRequest, digests: dict[str, Digest]
    ) -> SaveResult:
        if self._lock.mine is None or self._lock.mine.holder != record.holder:
            self._lock.mine = record
        attempt = replace(request, manifest=replace(request.manifest, epoch=record.epoch))
        path, nbytes = self._find_committed(attempt), 0
        if path is None:
            self._attempts.append(attempt)
            manifest = commit_checkpoint(self._directory, self._lock, attempt, digests)
            path, nbytes = self._directory.root / manifest.name, manifest.nbytes
        else:
            nbytes = read_raw_manifest(path).nbytes
        return _timed(SaveResult(request.manifest.step, ok=True, nbytes=nbytes, path=path), request)

    def _find_committed(self, request: CommitRequest) -> StoragePath | None:
        """What an earlier attempt has committed before the rank's next group took the lock; one
        that came too late gives its files back. Raises `SaveDroppedError` if there is a newer
        checkpoint.
        """
        names = [one.manifest.name for one in self._attempts]
        if not names and not self._is_carried:
            return None
        newest = self._lock.find_newest()
        if newest is not None and newest.name in names:
            return newest.path
        if newest is not None and newest.step >= request.manifest.step:
            raise SaveDroppedError
        for name in names if isinstance(self._directory.root, ObjectPath) else ():
            with suppress(FileNotFoundError):  # it does not count, and names the same files
                storage.remove(self._directory.root / name / MANIFEST)
        if names and isinstance(folder := request.temporary, Path) and not folder.exists():
            try:
                storage.rename(folder.with_name(names[-1]), folder)
            except FileNotFoundError:  # the next group has removed it, as it does not count
                raise SaveDroppedError from None
        return None

    def _record(self, result: SaveResult) -> None:
        seconds, visible = round(result.total_seconds, 4), round(result.visible_seconds, 4)
        noted: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # whatever the ledger is like, the commit is noted
            noted = commit.note_kept(self._ledger, result.step, **self._kept)
        try:
            self._ledger.append(
                "commit",
                step=result.step,
                seconds=seconds,
                visible_seconds=visible,
                bytes=result.nbytes,
                **noted,
            )
            if self.bounds_events:
                self._ledger.bound()
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

    def _find_root_cause(self, error: BaseException) -> BaseException:
        if self._is_carried and self._lock.mine is None:
            return error  # while it is written no lock is held
        root = error
        if isinstance(error, CheckpointException) and error.failures:
            root = reader.find_root_cause(error, OSError, LockLostError)
        if self._group.is_rank_zero:
            try:
                # the group that takes over deletes our files, which looks like a failing disk
                self._lock.check()
            except (LockLostError, OSError) as lost:
                root = lost if isinstance(lost, LockLostError) else root
        return root

    def _failed(self, request: CommitRequest, error: BaseException) -> SaveResult:
        request = self._attempts[-1] if self._attempts else request
        if isinstance(error, SaveDroppedError) or self.membership.is_dropped:
            discard(self._directory, request)
            return SaveResult(request.manifest.step, ok=False, cause=DROPPED)
        root = self._find_root_cause(error)
        message = f"{type(root).__name__}: {root}"
        secondary = not classify(root)[2]
        result = _timed(
            SaveResult(
                request.manifest.step,
                ok=False,
                cause=cause_of(root),
                error=message,
                secondary=secondary,
            ),
            request,
        )
        if self._group.is_rank_zero:
            if secondary:
                record_cut(self._ledger, step=result.step, folder=request.temporary.name)
            if not isinstance(root, UnsettledCommitError):
                discard(self._directory, request)
            log.warn("checkpoint-failed", step=result.step, cause=result.cause, error=result.error)
        return result


def _timed(result: SaveResult, request: CommitRequest) -> SaveResult:
    total = time.monotonic() - request.started
    visible = total if request.visible_seconds is None else request.visible_seconds
    return replace(result, visible_seconds=visible, total_seconds=total)


class _Alone(NamedTuple):
    """A group of one rank."""

    rank: int = 0
    size: int = 1
    generation: int = 0


class CarriedSave:
    """One save, which this process continues alone. Used on the thread of the training."""

    def __init__(
        self, task: BackgroundTask[SaveResult], membership: Membership, *, step: int, folder: str
    ) -> None:
        """Take over a save, which `task` writes to the folder of this name; it is committed once
        the rank is a member of a group (`attach`), under the lock that `membership` names.
        """
        self.step = step
        self.folder = folder
        """Name of the folder that it is written to."""
        self._membership = membership
        self._task = task
        self._result: SaveResult | None = None

    @classmethod
    def begin(
        cls,
        directory: CheckpointDirectory,
        config: Checkpointing,
        request: CommitRequest,
        staged: dict[str, Any],
        paths: Paths,
        described: Description | None,
    ) -> CarriedSave:
        """Begin to write one, of copies of the whole state, by flat name. `described` is what must
        be found when it is read back.
        """
        alone, lock = CheckpointGroup(_Alone()), Lock(directory.root)
        given: Any = {"group": alone, "lock": lock, "config": config, "shared": True}
        writer = Writer(directory, **given, is_carried=True)
        task = BackgroundTask[SaveResult]()
        content = partial(writer.write_tensors, request, staged, paths, described)
        task.start(lambda: writer.commit(request, content))
        step, folder = request.manifest.step, request.temporary.name
        return cls(task, writer.membership, step=step, folder=folder)

    @property
    def is_in_progress(self) -> bool:
        """Whether it has not ended. Any thread may ask."""
        return self._task.busy

    @property
    def result(self) -> SaveResult | None:
        """What has become of it; None while it is in progress."""
        return None if self._result is None and self._task.busy else self.wait()

    def wait(self) -> SaveResult:
        """What has become of it, once it has ended: it is committed, or dropped."""
        if self._result is None:
            self._result = self._task.collect()
        return self._result

    def attach(self, record: LockRecord) -> None:
        """Allow the commit: this rank is a member of the group whose rank 0 holds this record."""
        self._membership.set(record)

    def detach(self) -> None:
        """Leave the group. A commit in progress is not waited for: if it comes too late for this
        group, it is repeated in the next one.
        """
        self._membership.set(None)

    def drop(self) -> bool:
        """Give it up, unless it is committed; returns whether it is."""
        return self._membership.drop()
