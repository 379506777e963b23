"""One save from staged tensors to the acknowledged checkpoint: torch's DCP writes, through `files`, and rank 0 commits."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from kdist_trainer import log
from kdist_trainer.checkpoint import files, retention
from kdist_trainer.checkpoint.commit import Request, SaveResult, cause_of, commit, discard
from kdist_trainer.checkpoint.files import Digest
from kdist_trainer.checkpoint.layout import CheckpointDirectory
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock, Superseded
from kdist_trainer.checkpoint.peers import Peers
from kdist_trainer.checkpoint.staging import Paths
from kdist_trainer.failure import classify

# Saving without a process group is what we ask for where one rank writes everything.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class _DurableFileSystem(FileSystem):
    """DCP's view of the disk, through `files`: every stream is on the disk when it is closed, and its digest is known.

    DCP's own `sync_files` is off: it syncs `.metadata` before the bytes have left Python's buffer.
    """

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            raise ValueError(f"checkpoints are written once, not opened as {mode!r}")
        file = files.DurableFile(Path(path))
        with file:
            yield file
        self.digests[file.path.name] = file.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        files.rename(Path(path), Path(new_path))
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        files.make_folder(Path(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        files.remove(Path(path))


class _Writer(FileSystemWriter):
    """DCP's writer over that file system. What it notes of itself is the same for the same save, not a random number."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
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
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.mappings = dict(self._paths)


class Writer:
    """Carries out saves; `write` may run on a thread of its own, one at a time. Collective over `peers`."""

    def __init__(self, directory: CheckpointDirectory, *, peers: Peers, lock: Lock, keep: int, shared: bool) -> None:
        self._directory = directory
        self._peers = peers
        self._lock = lock
        self._keep = keep
        self._shared = shared
        self._ledger = RunLedger(directory.root)
        self.acknowledged: SaveResult | None = None

    def write(self, request: Request, staged: dict[str, Any], paths: Paths) -> SaveResult:
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

    def _write_tensors(self, request: Request, staged: dict[str, Any], paths: Paths) -> dict[str, Digest]:
        """Let DCP write every rank's share. Returns the digests of all files, each taken by the rank that wrote it."""
        alone = self._peers.size == 1 or not self._shared
        if alone and not self._peers.is_leader:
            return {}
        writer = _Writer(request.temporary, request.manifest.name)
        planner = _Planner(paths)
        state_dict_saver.save(staged, storage_writer=writer, planner=planner, process_group=self._peers.group, no_dist=alone)
        own = cast(_DurableFileSystem, writer.fs).digests
        shares = [own] if alone else self._peers.gather(own)
        return {name: digest for share in shares for name, digest in share.items()}

    def _commit(self, request: Request, digests: dict[str, Digest]) -> SaveResult:
        manifest = commit(self._directory, self._lock, request, digests)
        path = self._directory.root / manifest.name
        result = _timed(SaveResult(manifest.step, ok=True, nbytes=manifest.nbytes, path=path), request)
        self._note(result)
        retention.prune(self._directory, self._lock, keep=self._keep)
        return result

    def _note(self, result: SaveResult) -> None:
        seconds, visible = round(result.total_seconds, 4), round(result.visible_seconds, 4)
        try:
            self._ledger.append("commit", step=result.step, seconds=seconds, visible_seconds=visible, bytes=result.nbytes)
        except OSError as error:
            log.warn("ledger-failed", step=result.step, error=str(error))
        log.event(
            "checkpoint-committed",
            step=result.step,
            path=str(result.path),
            seconds=seconds,
            visible_seconds=visible,
            bytes=result.nbytes,
        )

    def _failed(self, request: Request, error: BaseException) -> SaveResult:
        root = _root_of(error)
        if self._peers.is_leader:
            try:
                self._lock.check()  # whoever takes over clears our files away, which looks like a failing disk
            except (Superseded, OSError) as lost:
                root = lost if isinstance(lost, Superseded) else root
        told = f"{type(root).__name__}: {root}"
        echo = not classify(root)[2]
        result = _timed(SaveResult(request.manifest.step, ok=False, cause=cause_of(root), error=told, echo=echo), request)
        if self._peers.is_leader:
            discard(request)
            log.warn("checkpoint-failed", step=result.step, cause=result.cause, error=result.error)
        return result


def _timed(result: SaveResult, request: Request) -> SaveResult:
    total = time.monotonic() - request.started
    visible = total if request.visible_seconds is None else request.visible_seconds
    return replace(result, visible_seconds=visible, total_seconds=total)


def _root_of(error: BaseException) -> BaseException:
    """The error of the rank where it began, out of DCP's collection of all ranks' errors."""
    if isinstance(error, CheckpointException) and error.failures:
        errors = [wrapped[0] for wrapped in error.failures.values()]
        return next((one for one in errors if isinstance(one, OSError | Superseded)), errors[0])
    return error
