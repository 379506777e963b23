"""Lets a training loop resume, save and complete a run: `CheckpointManager`.

Saves run in a background thread, one at a time, while training continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint.background import BackgroundTask
from kdist_trainer.checkpoint.carried_save import CarriedSave
from kdist_trainer.checkpoint.commit import CommitRequest, Save, SaveResult
from kdist_trainer.checkpoint.group import CheckpointGroup, RankInfo
from kdist_trainer.checkpoint.layout import Checkpoint, CheckpointDirectory
from kdist_trainer.checkpoint.loadable import Description, LoadableCheck
from kdist_trainer.checkpoint.lock import Lock, LockLostError, LockRecord
from kdist_trainer.checkpoint.manifest import Manifest, name_of, write_state
from kdist_trainer.checkpoint.opening import FolderOpener, LockRequest
from kdist_trainer.checkpoint.reader import LoadedCheckpoint
from kdist_trainer.checkpoint.restore import Fallback, JobCheck, Restore
from kdist_trainer.checkpoint.run_identity import RunIdentity, write_done
from kdist_trainer.checkpoint.staging import Paths, Stager
from kdist_trainer.checkpoint.state_json import UnloadableStateError
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.checkpoint.target import Template
from kdist_trainer.checkpoint.writer import Writer
from kdist_trainer.config import Checkpointing
from kdist_trainer.errors import CheckpointMismatchError, PeersLostError, StorageError

__all__ = ["CheckpointManager", "Fallback", "Save", "SaveResult"]
_ABANDON_SECONDS, _ABANDON_LOOKS = 0.2, 5


class CheckpointManager:
    """Checkpoints of one worker group in one folder.

    Collective: every rank calls the same methods in the same order. It writes the log and the run
    ledger. Rank 0 holds the folder's lock until `close`.
    """

    on_result: Callable[[SaveResult], None] | None = None
    """Called with the result of each save, on the thread that polls or waits."""
    check_group: Callable[[], None] = staticmethod(lambda: None)
    """Called while a save is waited for; raises if the group is broken, and nobody should wait."""

    def __init__(
        self,
        root: StoragePath,
        *,
        world: RankInfo,
        run_id: str,
        config: Checkpointing,
        job: Mapping[str, Any],
        take_over: bool = False,
        sharded: bool = False,
        holders: tuple[int, int] | None = None,
        is_known: bool = False,
        spared: Collection[str] = (),
    ) -> None:
        """Find out whether all ranks share `root`, and lock it for this run.

        Args:
            root: the checkpoint folder.
            world: this rank, and the generation that locks the folder.
            run_id: the run that the checkpoints belong to.
            config: `train.checkpoint` of the job.
            job: the part of the job that is stored with each checkpoint, as plain values.
            take_over: lock the folder even if another run holds it.
            sharded: whether ranks hold parts of the state, which needs a shared folder.
            holders: among the ranks with the same tensors, this one's index and their number; by
                default all ranks have the same ones.
            is_known: whether ranks of a former group, which has used the folder, continue in
                place: what is saved follows the newest checkpoint.
            spared: names of the folders that ranks of former groups still write to.

        Raises:
            CheckpointMismatchError: the folder belongs to another run or lacks what is needed.
            LockLostError: a later group of this run has locked it.
            StorageError: it cannot be written.
        """
        self.directory = CheckpointDirectory(root)
        self._group = CheckpointGroup(world)
        self._lock = Lock(root)
        self._identity = RunIdentity(run_id=run_id, job=job, world_size=world.size)
        self._blocking = config.mode == "blocking"
        request = LockRequest(run_id, world.generation, take_over, spared)
        self._opener = FolderOpener(self.directory, self._lock, self._group, request)
        self._folder = (
            self._opener.continue_in_place()
            if is_known
            else self._opener.open(must_be_shared=self.must_be_shared(sharded=sharded))
        )
        self.resumed = self._folder.newest
        self.shared = all(self._folder.sees)
        self._sees_rank_zero_folder = self._folder.sees[self._group.rank]
        self.epoch = self._folder.epoch
        folder: Any = {"group": self._group, "lock": self._lock, "shared": self.shared}
        self._restore = Restore(self.directory, by_rank_zero=config.load == "broadcast", **folder)
        self._writer = Writer(self.directory, config=config, spared=spared, **folder)
        self._config = config
        rank, size = holders or (self._group.rank, self._group.size)
        self._stager = Stager(
            rank=rank, size=size if self.shared else int(self._group.is_rank_zero)
        )
        self.loadable = LoadableCheck()
        """Whoever builds what a new process has sets its `prove`."""
        self.cuts = self._folder.cuts
        """The saves in a row that lost ranks have cut before this group was started."""
        self._saves = 0
        self._attempt: CommitRequest | None = None
        """The newest save that was started."""
        self.handed_over: CarriedSave | None = None
        """The save that this rank goes on with alone after `abandon`."""
        self._background = BackgroundTask[SaveResult]()

    @property
    def fallbacks(self) -> list[Fallback]:
        """Checkpoints that `load` skipped, newest first."""
        return self._restore.fallbacks

    def peek(self) -> LoadedCheckpoint | None:
        """The newest checkpoint whose manifest and state verify, the same on every rank; its
        tensors are not read. None if there is none.
        """
        return self._restore.peek()

    def load(
        self,
        model_and_optimizer: dict[str, Any] | Template,
        *,
        fingerprint: str,
        check_job: JobCheck | None = None,
    ) -> dict[str, Any] | None:
        """Fill the tensors in place from the newest checkpoint that verifies.

        Args:
            model_and_optimizer: the nested state to fill, or what makes it of what a checkpoint
                has.
            fingerprint: of the data; empty to accept any.
            check_job: called first, on every rank, with the job stored in the checkpoint.

        Returns:
            The state that was saved with the tensors; None if there is no checkpoint.

        Raises:
            CheckpointMismatchError: the checkpoint is of other data or another model, its job is
                rejected, or none of the checkpoints can be read.
        """
        found = self._restore.load(
            model_and_optimizer, fingerprint=fingerprint, check_job=check_job
        )
        if found is not None:
            self._follow(found.manifest)
        self._opener.set_base(self.resumed)
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
        blocking: bool = False,
        first: Collection[str] = (),
    ) -> Save:
        """Save a state as of `step`.

        When this returns, the tensors may change again; with mode `async` they are written in the
        background. Unless the save is required, a failure goes to `on_result` only.

        Args:
            tensors: model and optimizer, nested.
            state: what else to save, as JSON values.
            step: the optimizer step that the state is of.
            before_commit: called on rank 0, on the writing thread, before the commit.
            final: wait as for `required`, then write this document to DONE: the run has ended.
            required: wait for the commit, and try twice.
            blocking: wait for the commit, whatever the mode.
            first: flat names of tensors that differ between ranks and are saved from rank 0.

        Raises:
            StorageError: a required save failed twice.
            PeersLostError: a required save failed because other ranks are gone.
            LockLostError: another group has locked the folder.
            CheckpointMismatchError: there is a checkpoint of a later step.
            UnloadableStateError: the state could not be given back.
        """
        started = time.monotonic()
        waited = self._background.busy
        self.wait()
        self._refuse_earlier(step)
        staged, paths = self._stager.stage(tensors, first=first)
        described = self.loadable.check(tensors)
        must_succeed, waits = required or final is not None, blocking or self._blocking
        request = CommitRequest(
            manifest=self._describe(step, state),
            state=write_state(state, self._identity.job),
            temporary=Path(),
            started=started,
            visible_seconds=None if waits or must_succeed else time.monotonic() - started,
            before_commit=before_commit,
        )
        start = partial(self._start, request, staged, paths, described)
        start()
        if must_succeed:
            self._retry_save(start)
        elif waits:
            self.wait()
        if final is not None:
            identity = self._identity
            document = {
                "run_id": identity.run_id,
                "step": step,
                "checkpoint": request.manifest.name,
                **final,
                "job": identity.job,
            }
            sees = self._sees_rank_zero_folder
            write_done(self.directory, self._group, document, sees_rank_zero_folder=sees)
        return Save(step, time.monotonic() - started, waited)

    def poll(self) -> None:
        """Report a save that has ended to `on_result`. Raises `LockLostError` without the lock."""
        if not self._background.busy:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress, if any, and report it to `on_result`. Raises
        `LockLostError` if it had lost the lock.
        """
        if self._background.pending:
            self._collect()

    def reopen(self) -> None:
        """Mark the run as not ended, by removing DONE. Raises `StorageError`."""
        if not self._folder.may_be_done:
            return

        def remove() -> None:
            if self._group.is_rank_zero or not self._sees_rank_zero_folder:
                self.directory.remove_done()

        try:
            self._group.on_all_ranks(remove)
        except OSError as error:
            raise StorageError(f"cannot remove DONE from {self.directory.root}: {error}") from error

    def abandon(self) -> SaveResult | None:
        """End the save in progress of a group whose connections are cut: it is committed, or it
        fails since a rank does not respond. The lock stays: a later group takes it. Returns the
        result; None if there was no save, or it goes on (`handed_over`).

        Storage that takes long is not waited for. What this rank can commit without the others goes
        on in their next group; of what it only writes its part, nothing comes.
        """
        if not self._background.pending or (attempt := self._attempt) is None:
            return None
        writer, step = self._writer, attempt.manifest.step
        for _ in range(_ABANDON_LOOKS):
            if self._background.wait(_ABANDON_SECONDS):
                return self._background.collect()
            if writer.needs_nobody:
                writer.membership.set(None)
                writer.bounds_events = False  # the next rank 0 may do so at the same time
                place: Any = {"step": step, "folder": attempt.temporary.name}
                self.handed_over = CarriedSave(self._background, writer.membership, **place)
                return None
            if writer.is_writing:
                break
        return SaveResult(step, ok=False, cause="other", secondary=True)

    @property
    def lock_record(self) -> LockRecord | None:
        """What rank 0 holds the folder by."""
        return self._lock.mine

    def carry(self, tensors: dict[str, Any], state: dict[str, Any], *, step: int) -> CarriedSave:
        """Begin a save of the whole state that this rank, which holds all of it, writes alone. Not
        collective; the arguments are those of `save`.
        """
        started = time.monotonic()
        stager = Stager(rank=0, size=1)
        staged, paths = stager.stage(tensors)
        described = self.loadable.check(tensors)
        manifest = self._describe(step, state)
        request = CommitRequest(
            manifest=manifest,
            state=write_state(state, self._identity.job),
            # all ranks count their own saves alike, to name the same folder
            temporary=self.directory.new_folder(manifest.name, f"{self._folder.name}-carried"),
            started=started,
            visible_seconds=time.monotonic() - started,
        )
        return CarriedSave.begin(self.directory, self._config, request, staged, paths, described)

    def acknowledge(self, result: SaveResult) -> None:
        """Take in a checkpoint that another rank of this group has committed."""
        path = self.directory.root / name_of(result.step, self.epoch)
        if self.resumed is not None and self.resumed.step == result.step:
            path = self.resumed.path  # it was committed before this group took the lock
        self._writer.acknowledged = replace(result, path=path)
        self.loadable.confirm()

    def close(self) -> None:
        """Wait for the save in progress and release the lock, so that any run may use the folder.

        A rank that fails must not call this: the others may be gone. It may be called twice.
        """
        self.wait()
        if self._group.is_rank_zero:
            self._lock.release()

    def must_be_shared(self, *, sharded: bool) -> str | None:
        """Why all ranks must share the folder, and what to do otherwise; None if they need not."""
        if not sharded:
            return None
        return (
            "and each holds a part of the model: "
            "use a volume that all nodes mount (ReadWriteMany), or strategy ddp"
        )

    def _follow(self, manifest: Manifest) -> None:
        """Note the checkpoint that what is saved from now on follows."""
        path = self.directory.root / manifest.name
        self.resumed = Checkpoint(manifest.step, manifest.epoch, path)
        if self._writer.acknowledged is not None and self._writer.acknowledged.path != path:
            self._writer.acknowledged = None  # it could not be read

    def _refuse_earlier(self, step: int) -> None:
        """Raise `CheckpointMismatchError` if there is a checkpoint of a later step: that one would
        be resumed from.
        """
        acknowledged = self._writer.acknowledged
        newest = max(
            acknowledged.step if acknowledged is not None else -1,
            self.resumed.step if self.resumed is not None else -1,
        )
        if step < newest:
            raise CheckpointMismatchError(
                f"the state of step {step} is not saved: the newest checkpoint of this run is of "
                f"step {newest}, and a restart would resume from that one; count the steps on "
                "from what resume() has returned, or start again with --fresh"
            )

    def _describe(self, step: int, state: dict[str, Any]) -> Manifest:
        last = self._writer.acknowledged or self.resumed
        parent = None if last is None else last.path
        return self._identity.describe(state, step=step, epoch=self.epoch, parent=parent)

    def _start(
        self,
        request: CommitRequest,
        staged: dict[str, Any],
        paths: Paths,
        described: Description | None,
    ) -> None:
        """Start one attempt in a folder of its own: files that failed are not written again."""
        attempt = replace(request, temporary=self._new_folder(request.manifest.name))
        self._attempt = attempt
        self._writer.begin()
        self._background.start(lambda: self._writer.write(attempt, staged, paths, described))

    def _new_folder(self, name: str) -> StoragePath:
        self._saves += 1
        return self.directory.new_folder(name, f"{self._folder.name}-{self._saves}")

    def _collect(self) -> SaveResult:
        while not self._background.wait(_ABANDON_SECONDS):
            self.check_group()
        result = self._background.collect()
        if self.on_result is not None:
            self.on_result(result)
        if result.cause == "superseded":
            raise LockLostError(result.error)
        if result.cause == "unloadable":
            raise UnloadableStateError(result.error.partition(": ")[2])
        if result.ok:
            self.loadable.confirm()
        return result

    def _retry_save(self, start: Callable[[], None]) -> None:
        """Wait for the current attempt and make a second one if the disk failed.

        Raises `StorageError` if that fails too, and `PeersLostError` when other ranks are gone.
        """
        result = self._collect()
        if not (result.ok or result.secondary):
            start()
            result = self._collect()
        if not result.ok:
            problem = PeersLostError if result.secondary else StorageError
            raise problem(f"the state of step {result.step} could not be saved: {result.error}")
