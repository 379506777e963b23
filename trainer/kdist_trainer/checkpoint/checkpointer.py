"""`CheckpointManager`: how a training loop resumes, saves and completes a run.

Saves run in a background thread, one at a time, while training continues.
"""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import kdist_trainer
from kdist_trainer import log
from kdist_trainer.checkpoint import commit, peers
from kdist_trainer.checkpoint.commit import CommitRequest, SaveResult
from kdist_trainer.checkpoint.layout import Checkpoint, CheckpointDirectory, Manifest
from kdist_trainer.checkpoint.lock import Lock, LockLostError
from kdist_trainer.checkpoint.peers import CheckpointGroup, RankInfo
from kdist_trainer.checkpoint.restore import Fallback, Judge, Restore
from kdist_trainer.checkpoint.writer import Paths, Stager, Writer
from kdist_trainer.config import Checkpointing
from kdist_trainer.errors import CheckpointMismatchError, PeersLostError, StorageError

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Runs one function on a daemon thread: a process that ends by force does not wait for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._results: list[T] = []

    @property
    def busy(self) -> bool:
        """Whether something was started that has not yet ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pending(self) -> bool:
        """Whether something was started whose result was not yet taken."""
        return self._thread is not None

    def start(self, work: Callable[[], T]) -> None:
        """Start `work`, which must not raise. The result of what was started before must have been
        taken.
        """

        def run() -> None:
            self._results.append(work())

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Wait for the end of what was started and return its result."""
        assert self._thread is not None  # noqa: S101 - asked for only while pending
        self._thread.join()
        self._thread = None
        return self._results.pop()


__all__ = ["CheckpointManager", "Fallback", "Save", "SaveResult"]


@dataclass(frozen=True)
class Save:
    """A save that was begun: how long the training stood still for it, and whether it had to wait
    for the one before.
    """

    step: int
    visible_seconds: float
    waited: bool


class CheckpointManager:
    """Checkpoints of one group of ranks in one folder.

    Collective: every rank calls the same methods in the same order. Logs and the run ledger are
    written here; `on_result` is for counting. Rank 0 of the group holds the folder's lock until
    `close`.
    """

    on_result: Callable[[SaveResult], None] | None = None

    def __init__(
        self,
        root: Path,
        *,
        world: RankInfo,
        run_id: str,
        config: Checkpointing,
        job: Mapping[str, Any],
        take_over: bool = False,
        sharded: bool = False,
        holders: tuple[int, int] | None = None,
    ) -> None:
        """Find out whether all ranks share `root`, and lock it for this run at the world's
        generation.

        `job`: what is kept of the job with each checkpoint, as plain values. `sharded`: ranks hold
        parts of the state, which only a shared folder can take. `holders`: which one of how many
        ranks that hold the same tensors this one is; by default all do. Raises
        `CheckpointMismatchError` when the folder belongs to another run or cannot serve,
        `LockLostError` when a later group of this run has it, `StorageError` when it cannot be
        written.
        """
        self.directory = CheckpointDirectory(root)
        self.resumed: Checkpoint | None = None
        self._peers = CheckpointGroup(world)
        self._lock = Lock(root)
        self._run_id = run_id
        self._blocking = config.mode == "blocking"
        self._job = dict(job)
        self._config_digest = hashlib.sha256(
            json.dumps(self._job, sort_keys=True).encode()
        ).hexdigest()
        seen = peers.probe(root, self._peers)
        self.shared = all(seen)
        self._sees_leader = seen[self._peers.rank]
        self._say_if_not_shared(sharded)
        self.epoch = self._acquire(world.generation, take_over)
        folder: Any = {"peers": self._peers, "lock": self._lock, "shared": self.shared}
        self._restore = Restore(self.directory, by_leader=config.load == "broadcast", **folder)
        self._writer = Writer(self.directory, keep=config.keep, **folder)
        rank, size = holders or (self._peers.rank, self._peers.size)
        self._stager = Stager(rank=rank, size=size if self.shared else int(self._peers.is_leader))
        self._id = self._peers.broadcast(secrets.token_hex(4))
        self._saves = 0
        self._background = BackgroundTask[SaveResult]()

    @property
    def fallbacks(self) -> list[Fallback]:
        """Checkpoints that `load` passed over, newest first."""
        return self._restore.fallbacks

    def load(
        self, model_and_optimizer: dict[str, Any], *, fingerprint: str, judge: Judge | None = None
    ) -> dict[str, Any] | None:
        """Fill the tensors in place from the newest checkpoint that verifies, and return the state
        saved with it.

        None when there is no checkpoint. Raises `CheckpointMismatchError` when it is of other data
        (`fingerprint`) or of another model, or when none of the checkpoints can be read. `judge` is
        asked first, with the job that the checkpoint is of, on every rank; it may raise
        `CheckpointMismatchError` too.
        """
        found = self._restore.load(model_and_optimizer, fingerprint=fingerprint, judge=judge)
        if found is not None:
            manifest = found.manifest
            self.resumed = Checkpoint(
                manifest.step, manifest.epoch, self.directory.root / manifest.name
            )
        self._on_lock(lambda: self._lock.set_base(self.resumed))
        return found.state if found is not None else None

    def save(
        self,
        tensors: dict[str, Any],
        state: dict[str, Any],
        *,
        step: int,
        before_commit: Callable[[], None] | None = None,
        final: dict[str, Any] | None = None,
        required: bool = False,
        first: Collection[str] = (),
    ) -> Save:
        """Save `tensors` (model and optimizer) and `state` (JSON) as of `step`.

        When this returns, the tensors may change again; with mode `async` they are written
        meanwhile. A failure is told to `on_result` and the training goes on. `before_commit` runs
        on rank 0, on the writing thread, before the commit. `required`: wait until it is committed,
        try a second time, then raise `StorageError`, and `PeersLostError` at once when other ranks
        are gone. `final`: the same, and then write this document to DONE: the run has ended.
        `first`: flat names of tensors in which ranks may differ, and of which rank 0's are saved.
        """
        started = time.monotonic()
        waited = self._background.busy
        self.wait()
        staged, paths = self._stager.stage(tensors, first=first)
        insist = required or final is not None
        request = CommitRequest(
            manifest=self._describe(step, state),
            state=json.dumps({"state": state, "job": self._job}, indent=1).encode() + b"\n",
            temporary=Path(),
            started=started,
            visible_seconds=None if self._blocking or insist else time.monotonic() - started,
            before_commit=before_commit,
        )
        self._start(request, staged, paths)
        if insist:
            self._insist(request, staged, paths)
        elif self._blocking:
            self.wait()
        if final is not None:
            self._write_done(
                {
                    "run_id": self._run_id,
                    "step": step,
                    "checkpoint": request.manifest.name,
                    **final,
                    "job": self._job,
                }
            )
        return Save(step, time.monotonic() - started, waited)

    def poll(self) -> None:
        """Tell `on_result` of a save that has ended meanwhile. Raises `LockLostError` if it found
        the lock lost.
        """
        if not self._background.busy:
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way, if any, and tell `on_result`. Raises `LockLostError` if it
        found the lock lost.
        """
        if self._background.pending:
            self._take()

    def reopen(self) -> None:
        """The run goes on: an earlier word that it had ended no longer holds. Raises
        `StorageError`.
        """

        def remove() -> None:
            if self._peers.is_leader or not self._sees_leader:
                self.directory.remove_done()

        try:
            self._peers.everywhere(remove)
        except OSError as error:
            raise StorageError(f"cannot remove DONE from {self.directory.root}: {error}") from error

    def close(self) -> None:
        """Wait for the save under way and release the lock, so that any run may use the folder. It
        may be called twice.

        Not for a rank that fails: its peers may be gone. Ending the process is enough then.
        """
        self.wait()
        if self._peers.is_leader:
            self._lock.release()

    def _acquire(self, generation: int, take_over: bool) -> int:
        """Lock the folder on rank 0. Epochs must grow over all folders: where each node has its
        own, they may have parted.
        """
        known = self._peers.gather(
            max((one.epoch for one in self.directory.committed()), default=0)
        )
        epoch = generation if self.shared else max(generation, max(known) + 1)
        claim = self._on_lock(
            lambda: self._lock.acquire(run_id=self._run_id, epoch=epoch, take_over=take_over)
        )
        if self._peers.is_leader:
            commit.clean_stale(self.directory, epoch=claim.epoch)
        return claim.epoch

    def _on_lock(self, work: Callable[[], T]) -> T:
        try:
            return self._peers.on_leader(work)
        except OSError as error:
            raise StorageError(
                f"cannot write the lock of {self.directory.root}: {error}"
            ) from error

    def _say_if_not_shared(self, sharded: bool) -> None:
        if self.shared:
            return
        if sharded:
            raise CheckpointMismatchError(
                f"the ranks do not share the checkpoint folder {self.directory.root}, and "
                "each holds a part of the model: "
                "use a volume that all nodes mount (ReadWriteMany), or strategy ddp"
            )
        if self._peers.is_leader:
            log.warn(
                "storage-not-shared",
                message=(
                    f"{self.directory.root} is not one folder for all ranks: rank 0 writes "
                    "everything and broadcasts on load"
                ),
            )

    def _describe(self, step: int, state: dict[str, Any]) -> Manifest:
        acknowledged = self._writer.acknowledged
        parent = (
            acknowledged.path
            if acknowledged is not None
            else self.resumed.path
            if self.resumed
            else None
        )
        return Manifest(
            step=step,
            epoch=self.epoch,
            samples_seen=int(state.get("samples_seen", 0)),
            world_size=self._peers.size,
            run_id=self._run_id,
            parent=parent.name if parent is not None else None,
            config_digest=self._config_digest,
            versions={
                "kdist": kdist_trainer.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )

    def _start(self, request: CommitRequest, staged: dict[str, Any], paths: Paths) -> None:
        """Begin one attempt, in a folder of its own: files that were once refused are not touched
        again.
        """
        self._saves += 1
        temporary = self.directory.root / f"{request.manifest.name}.tmp-{self._id}-{self._saves}"
        attempt = replace(request, temporary=temporary)
        self._background.start(lambda: self._writer.write(attempt, staged, paths))

    def _take(self) -> SaveResult:
        result = self._background.take()
        if self.on_result is not None:
            self.on_result(result)
        if result.cause == "superseded":
            raise LockLostError(result.error)
        return result

    def _insist(self, request: CommitRequest, staged: dict[str, Any], paths: Paths) -> None:
        """Wait for the attempt under way and make a second one if the disk refused it.

        Raises `StorageError` if that fails too, and `PeersLostError` when other ranks are gone.
        """
        result = self._take()
        if not (result.ok or result.echo):
            self._start(request, staged, paths)
            result = self._take()
        if not result.ok:
            problem = PeersLostError if result.echo else StorageError
            raise problem(f"the state of step {result.step} could not be saved: {result.error}")

    def _write_done(self, document: dict[str, Any]) -> None:
        """Say that the run has ended in every folder that ranks look at. Raises `StorageError`
        after a second try.
        """

        def write() -> None:
            if self._peers.is_leader or not self._sees_leader:
                self.directory.write_done(document)

        for attempt in (1, 2):
            try:
                self._peers.everywhere(write)
            except OSError as error:
                if attempt == 2:
                    raise StorageError(
                        f"the end of the run could not be noted in {self.directory.root}: {error}"
                    ) from error
            else:
                return
