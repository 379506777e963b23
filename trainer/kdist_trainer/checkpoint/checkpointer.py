"""Lets a training resume, save and complete a run: `CheckpointManager` for a training loop,
`FileCheckpointManager` for a framework that writes and reads files in its own format.

Saves run in a background thread, one at a time, while training continues. A save that must succeed
is a `RequiredSave`: before a stop there is time for two attempts; the last save of a training is
tried for longer, since the ranks hold what is finished, and otherwise it would be computed again,
for the same storage.

A framework writes into the temporary folder of a save. In the background all ranks sync and digest
the files, and rank 0 commits them as any other checkpoint. With checkpoints in an object store it
writes to and reads from a folder of this node, from which the ranks upload the files, and to which
one rank downloads them. What it is given to read has been verified before.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

import kdist_trainer
from kdist_trainer import log
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.commit import CommitRequest, Save, SaveResult
from kdist_trainer.checkpoint.interval import LONGEST_INTERVAL
from kdist_trainer.checkpoint.lock import LockLostError
from kdist_trainer.checkpoint.manifest import (
    FILES,
    NOT_REGULAR,
    Checkpoint,
    CheckpointDirectory,
    Manifest,
    UnloadableStateError,
    write_state,
)
from kdist_trainer.checkpoint.reader import LoadedCheckpoint, Template
from kdist_trainer.checkpoint.restore import (
    SHARDED,
    Fallback,
    FolderAccess,
    JobCheck,
    LockRequest,
    Restore,
)
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.checkpoint.writer import (
    CarriedSave,
    Description,
    LoadableCheck,
    Paths,
    Stager,
    Writer,
)
from kdist_trainer.config import Checkpointing
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup, RankInfo
from kdist_trainer.errors import CheckpointMismatchError, PeersLostError, StorageError, classify
from kdist_trainer.formats import SCRATCH, checkpoint_name
from kdist_trainer.formats.digest import Digest
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.processes.threads import BackgroundTask, BoundedCalls

LONGEST_SECONDS: Final = LONGEST_INTERVAL
"""How long the ranks hold a finished training for its last save. A run that saves by `auto` has at
most this long between two saves: to compute that again takes no longer than this wait.
"""
_FIRST_PAUSE: Final = 20.0
_LONGEST_PAUSE: Final = 600.0
_LOOK_SECONDS: Final = 0.5
_GROWN_BYTES: Final = 1 << 20
"""So much more room than at the last attempt is a reason for another one."""


class _Next(Enum):
    WAIT, ATTEMPT, LAST_ATTEMPT, END = range(4)


@dataclass(frozen=True)
class Waiting:
    """How a rank waits for the storage.

    Attributes:
        check_group: Called at least every second; raises if the group is broken, so that nobody
            should wait.
        is_asked_to_stop: Whether this rank was asked to stop.
        beat: Called at least every second while a finished training waits, as a sign of life.
        pause_seconds: How long to wait for the next attempt; rank 0's counts.
    """

    check_group: Callable[[], object] = lambda: None
    is_asked_to_stop: Callable[[], bool] = bool
    beat: Callable[[], object] = lambda: None
    pause_seconds: Callable[[], float] = lambda: _FIRST_PAUSE


class RequiredSave:
    """Attempts of one save after another, until one has succeeded or it is given up. Every rank
    calls it, and all do the same.
    """

    def __init__(self, group: CheckpointGroup, root: StoragePath) -> None:
        self.waiting = Waiting()
        self._group = group
        self._root = root
        self._calls = BoundedCalls(str(root))
        self._give_up_at: float | None = None

    def look(self) -> None:
        """Called at least every second while an attempt is in progress. Raises if the group is
        broken.
        """
        self.waiting.check_group()
        if self._give_up_at is not None and time.monotonic() < self._give_up_at:
            self.waiting.beat()  # storage that does not answer is no rank that hangs

    def make(self, attempt: Callable[[], SaveResult], *, is_last: bool) -> None:
        """Attempt a save, with the same result of an attempt on every rank; `is_last` says whether
        it is the last one of a finished training.

        Raises:
            StorageError: no attempt has succeeded.
            PeersLostError: other ranks are gone.
        """
        self._give_up_at = time.monotonic() + LONGEST_SECONDS if is_last else None
        try:
            result = attempt()
            if not (result.ok or result.secondary):
                result = attempt()
            following = _Next.ATTEMPT if is_last else _Next.LAST_ATTEMPT
            while following is _Next.ATTEMPT and not (result.ok or result.secondary):
                following = self._wait(result)
                if following is not _Next.END:
                    result = attempt()
        finally:
            self._give_up_at = None
        if not result.ok:
            problem = PeersLostError if result.secondary else StorageError
            raise problem(f"the state of step {result.step} could not be saved: {result.error}")

    def _wait(self, result: SaveResult) -> _Next:
        """Wait for the storage; returns what all ranks do then."""
        assert self._give_up_at is not None  # noqa: S101 - there is a last save
        is_rank_zero, now = self._group.is_rank_zero, time.monotonic()
        left = self._give_up_at - now
        pause = max(0.0, min(self.waiting.pause_seconds(), _LONGEST_PAUSE, left))
        room = self._find_room() if is_rank_zero else None
        if is_rank_zero:
            what = f"the finished training, step {result.step}, waits to be saved"
            then = f"next try in {pause:.0f} s, or as soon as there is room"
            if left <= 0:
                then = f"given up after {LONGEST_SECONDS / 60:.0f} min"
            log.warn(
                "save-waits",
                step=result.step,
                cause=result.cause,
                message=f"storage: {self._root}: {what}: {result.error}; free space, or repair it; "
                f"{then}",
            )
        while True:
            self.waiting.beat()
            self.waiting.check_group()
            following = _Next.WAIT
            if left <= 0:
                following = _Next.END
            elif time.monotonic() >= now + pause or (
                room is not None and (self._find_room() or 0) >= room + _GROWN_BYTES
            ):
                following = _Next.ATTEMPT
            answers = self._group.gather((self.waiting.is_asked_to_stop(), following))
            if any(stops for stops, _ in answers):
                return _Next.LAST_ATTEMPT
            following = answers[0][1]
            if following is not _Next.WAIT:
                return following
            time.sleep(_LOOK_SECONDS)

    def _find_room(self) -> int | None:
        """The bytes that are free in the folder; None if that is not known."""
        root = self._root
        if not isinstance(root, Path):
            return None
        with suppress(OSError):
            found = self._calls.call(lambda: os.statvfs(root))
            return found.f_bavail * found.f_frsize
        return None


_ABANDON_SECONDS, _ABANDON_LOOKS = 0.2, 5


class CheckpointManager:
    """Checkpoints of one worker group in one folder.

    Collective: every rank calls the same methods in the same order. It writes the log and the run
    ledger. Rank 0 holds the folder's lock until `close`.
    """

    on_result: Callable[[SaveResult], None] | None = None
    """Called with the result of each save, on the thread that polls or waits."""
    must_be_shared: str | None = None
    """Why all ranks must share the folder, and what to do otherwise; None if they need not."""
    on_open: Callable[[], None] = staticmethod(lambda: None)
    """Called on every rank once the folder is open that did not answer at first."""

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
                place: what is saved follows the newest checkpoint, and storage that fails is
                `trouble`, not an error: they need it for saves only.
            spared: names of the folders that ranks of former groups still write to.

        Raises:
            CheckpointMismatchError: the folder belongs to another run or lacks what is needed.
            LockLostError: a later group of this run has locked it.
            StorageError: it cannot be written.
        """
        self.directory = CheckpointDirectory(root)
        self._group = CheckpointGroup(world)
        self._run_id, self._job = run_id, dict(job)
        self._blocking = config.mode == "blocking"
        self._config, self._spared, self._holders = config, spared, holders
        self.folder = FolderAccess(
            self.directory,
            self._group,
            LockRequest(run_id, world.generation, take_over, spared),
            must_be_shared=self.must_be_shared or (SHARDED if sharded else None),
            is_known=is_known,
        )
        self.required = RequiredSave(self._group, root)
        self._use_folder()
        self.loadable = LoadableCheck()
        """Whoever builds what a new process has sets its `prove`."""
        self._saves = 0
        self._attempt: CommitRequest | None = None
        """The newest save that was started."""
        self.handed_over: CarriedSave | None = None
        """The save that this rank continues alone after `abandon`."""
        self._background = BackgroundTask[SaveResult]()

    def _use_folder(self) -> None:
        """Save to the folder and restore from it, as far as it is open."""
        folder, group = self.folder, self._group
        self.resumed, self.epoch = folder.opened.newest, folder.opened.epoch
        self.cuts = folder.opened.cuts
        """The saves in a row that lost ranks have cut before this group was started."""
        self.shared = folder.shared
        given: Any = {"group": group, "lock": folder.lock, "shared": self.shared}
        by_rank_zero = self._config.load == "broadcast"
        self._restore = Restore(self.directory, by_rank_zero=by_rank_zero, **given)
        self._writer = Writer(self.directory, config=self._config, spared=self._spared, **given)
        rank, size = self._holders or (group.rank, group.size)
        self._stager = Stager(rank=rank, size=size if self.shared else int(group.is_rank_zero))

    def open(self) -> None:
        """Open the folder, if that has failed so far; see `FolderAccess`. Raises `StorageError`."""
        if self.folder.trouble is not None:
            self.folder.open_late()
            self._use_folder()
            self.on_open()

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
            StorageError: the folder cannot be opened.
        """
        self.open()
        found = self._restore.load(
            model_and_optimizer, fingerprint=fingerprint, check_job=check_job
        )
        if found is not None:
            self._follow(found.manifest)
        self.folder.set_base(self.resumed)
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
        is_needed, waits = required or final is not None, blocking or self._blocking
        begun: list[Callable[[], None]] = []

        def begin() -> SaveResult | None:
            if (refused := self._open_for(step)) is not None:
                return refused
            if not begun:
                self._refuse_earlier(step)
                staged, paths = self._stager.stage(tensors, first=first)
                described = self.loadable.check(tensors)
                seen = None if waits or is_needed else time.monotonic() - started
                request = self._request(step, state, started, seen, before_commit)
                begun.append(partial(self._start, request, staged, paths, described))
            begun[0]()
            return None

        def attempt() -> SaveResult:
            result = begin() or self._collect()
            return self._end_run(step, final) if result.ok and final is not None else result

        if is_needed:
            self.required.make(attempt, is_last=final is not None)
        elif begin() is None and waits:
            self.wait()
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

    def carry(self, tensors: dict[str, Any], state: dict[str, Any], *, step: int) -> CarriedSave:
        """Begin a save of the whole state that this rank, which holds all of it, writes alone. Not
        collective; the arguments are those of `save`.
        """
        started = time.monotonic()
        stager = Stager(rank=0, size=1)
        staged, paths = stager.stage(tensors)
        described = self.loadable.check(tensors)
        request = self._request(step, state, started, time.monotonic() - started)
        # all ranks count their own saves alike, to name the same folder
        name = f"{self.folder.opened.name}-carried"
        temporary = self.directory.new_folder(request.manifest.name, name)
        request = replace(request, temporary=temporary)
        return CarriedSave.begin(self.directory, self._config, request, staged, paths, described)

    def acknowledge(self, result: SaveResult) -> None:
        """Take in a checkpoint that another rank of this group has committed."""
        path = self.directory.root / checkpoint_name(result.step, self.epoch)
        if self.resumed is not None and self.resumed.step == result.step:
            path = self.resumed.path  # it was committed before this group took the lock
        self._writer.acknowledged = replace(result, path=path)
        self.loadable.confirm()

    def close(self) -> None:
        """Wait for the save in progress and release the lock, so that any run may use the folder.

        A rank that fails must not call this: the others may be gone. It may be called twice.
        """
        self.wait()
        self.folder.release()

    def _open_for(self, step: int) -> SaveResult | None:
        """Open the folder to save `step`, if that has failed so far; returns the result if it fails
        again, or if there is a newer checkpoint.
        """
        if self.folder.trouble is None:
            return None
        try:
            self.open()
        except StorageError as error:
            return self._report(self.folder.refuse(step, error))
        newest = self.resumed
        if newest is None or newest.step <= step:
            return None
        return SaveResult(newest.step, ok=True, path=newest.path)

    def _report(self, result: SaveResult) -> SaveResult:
        if self.on_result is not None:
            self.on_result(result)
        return result

    def _end_run(self, step: int, final: dict[str, Any]) -> SaveResult:
        """Write DONE after the last checkpoint."""
        document = {
            "run_id": self._run_id,
            "step": step,
            "checkpoint": checkpoint_name(step, self.epoch),
            **final,
            "job": self._job,
        }
        result = self.folder.end_run(document)
        return result if result.ok else self._report(result)

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

    def _request(
        self,
        step: int,
        state: dict[str, Any],
        started: float,
        visible_seconds: float | None,
        before_commit: Callable[[], None] | None = None,
    ) -> CommitRequest:
        """What to commit, without the folder of an attempt."""
        last = self._writer.acknowledged or self.resumed
        manifest = Manifest(
            step=step,
            epoch=self.epoch,
            samples_seen=state.get("samples_seen"),
            world_size=self._group.size,
            run_id=self._run_id,
            parent=None if last is None or last.path is None else last.path.name,
            config_digest=sha256(encode_json(self._job, sort_keys=True).encode()).hexdigest(),
            versions={
                "kdist": kdist_trainer.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )
        return CommitRequest(
            manifest=manifest,
            state=write_state(state, self._job),
            temporary=Path(),
            started=started,
            visible_seconds=visible_seconds,
            before_commit=before_commit,
        )

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
        content = partial(self._writer.write_tensors, attempt, staged, paths, described)
        self._background.start(lambda: self._writer.commit(attempt, content))

    def _new_folder(self, name: str) -> StoragePath:
        self._saves += 1
        return self.directory.new_folder(name, f"{self.folder.opened.name}-{self._saves}")

    def _collect(self) -> SaveResult:
        while not self._background.wait(_ABANDON_SECONDS):
            self.required.look()
        result = self._report(self._background.collect())
        if result.cause == "superseded":
            raise LockLostError(result.error)
        if result.cause == "unloadable":
            raise UnloadableStateError(result.error.partition(": ")[2])
        if result.ok:
            self.loadable.confirm()
        return result


_NO_FILE: Final = "the framework wrote no file"
WriteFiles = Callable[[Path], None]
"""Writes this rank's files into a folder that all ranks share. Called on every rank."""


class FileCheckpointManager(CheckpointManager):
    """Commits and verifies what a framework writes. Collective, as `CheckpointManager` is."""

    must_be_shared = (
        "which the checkpoints of a framework need: use a volume that all nodes mount "
        "(ReadWriteMany), or kdist's Checkpointer in a loop of your own"
    )

    def find(self, framework: str) -> tuple[int, Path] | None:
        """Find the newest checkpoint that verifies, which the framework must have written; what is
        saved from now on follows it. Returns its step, and the folder of the framework's files;
        None if there is none. Raises `CheckpointMismatchError` if it is another framework's, or
        none can be read.
        """
        found = self._restore.find(framework)
        if found is not None:
            self._follow(found.manifest)
        self.folder.set_base(self.resumed)
        if found is None or self.resumed is None:
            return None
        path = self.resumed.path
        return self.resumed.step, (
            path if isinstance(path, Path) else self._download(path, found.manifest)
        ) / FILES

    def _download(self, folder: ObjectPath, manifest: Manifest) -> Path:
        """Have one rank of each node download a checkpoint's files, and verify them once more."""
        restored = _local_folder() / "restored"
        target = restored / manifest.name

        def download() -> None:
            if os.environ.get("LOCAL_RANK", "0") != "0":
                return
            shutil.rmtree(restored, ignore_errors=True)
            files = manifest.locate(folder)
            for name, digest in manifest.files.items():
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                hasher = digest.hasher()
                with path.open("wb") as file:
                    for piece in storage.read_pieces(files / name):
                        hasher.update(piece)
                        file.write(piece)
                if hasher.hexdigest() != digest.value:
                    raise StorageError(f"{files / name} arrived damaged")

        self._group.on_all_ranks(download)
        return target

    def save_files(
        self,
        write: WriteFiles,
        *,
        framework: str,
        step: int,
        required: bool = False,
        blocking: bool = False,
    ) -> None:
        """Have a framework write a checkpoint as of `step`, and commit it in the background.

        Args:
            write: called on the thread of the caller, because it may use the framework's own
                process groups and devices.
            framework: the framework.
            step: the number of completed steps.
            required: wait for the commit, and try twice.
            blocking: wait for the commit, whatever the mode.

        Raises:
            StorageError: a required save failed twice. Otherwise a failure goes to `on_result`.
            PeersLostError: a required save failed because other ranks are gone.
            LockLostError: another group has locked the folder.
            CheckpointMismatchError: there is a checkpoint of a later step.
        """
        started = time.monotonic()
        self.wait()
        self._refuse_earlier(step)
        commit = partial(self._commit_files, write, framework=framework, step=step, started=started)

        def attempt() -> SaveResult:
            commit()
            return self._collect()

        acknowledged = self._writer.acknowledged
        if acknowledged is not None and acknowledged.step == step:
            return
        if required:
            self.required.make(attempt, is_last=False)
            return
        commit()
        if blocking or self._blocking:
            self.wait()

    def _commit_files(
        self, write: WriteFiles, *, framework: str, step: int, started: float
    ) -> None:
        temporary = self._new_folder(checkpoint_name(step, self.epoch))
        local = temporary if isinstance(temporary, Path) else _local_folder() / temporary.name
        error = self._write(write, local)
        state = {"step": step, "framework": framework}
        request = self._request(step, state, started, time.monotonic() - started)
        request = replace(request, temporary=temporary)

        def finish() -> dict[str, Digest]:
            if error is not None:
                raise error
            if isinstance(temporary, Path):
                return self._digest(temporary)
            return self._upload(local, temporary)

        def commit() -> SaveResult:
            try:
                return self._writer.commit(request, finish)
            finally:
                if local != temporary:
                    shutil.rmtree(local, ignore_errors=True)

        self._writer.begin()
        self._background.start(commit)

    def _write(self, write: WriteFiles, temporary: Path) -> Exception | None:
        """Call `write` on every rank; returns the error of a disk, the same on every rank."""
        problem: Exception | None = None

        def make_folders() -> None:
            storage.make_folder(temporary)
            storage.make_folder(temporary / FILES)

        try:
            self._group.on_all_ranks(make_folders)
        except OSError as error:
            return error
        try:
            write(temporary / FILES)
        except (OSError, RuntimeError, SafetensorError) as error:
            # torch and safetensors report a full disk as errors of their own
            if not classify(error)[2]:
                raise  # other ranks are gone
            problem = error if isinstance(error, OSError) else StorageError(str(error))
        return next((error for error in self._group.gather(problem) if error is not None), None)

    def _digest(self, temporary: Path) -> dict[str, Digest]:
        """Sync and digest this rank's share of the files; returns the digests of all."""
        names = self._group.on_rank_zero(partial(_find_files, temporary))
        if not names:
            raise StorageError(_NO_FILE)

        def digest() -> dict[str, Digest]:
            return {
                name: storage.sync_file(temporary / name)
                for name in names[self._group.rank :: self._group.size]
            }

        shares = self._group.on_all_ranks(digest)
        if self._group.is_rank_zero:
            for folder in {(temporary / name).parent for name in names}:
                storage.sync_folder(folder)
        return {name: found for share in shares for name, found in share.items()}

    def _upload(self, local: Path, target: ObjectPath) -> dict[str, Digest]:
        """Upload what this rank is the first to see of the files; returns the digests of all."""
        seen = self._group.on_all_ranks(partial(_find_files, local))
        owners = {name: rank for rank in reversed(range(len(seen))) for name in seen[rank]}
        if not owners:
            raise StorageError(_NO_FILE)

        def upload() -> dict[str, Digest]:
            digests = {}
            for name in (name for name, rank in owners.items() if rank == self._group.rank):
                stream = storage.create(target / name)
                with stream, (local / name).open("rb") as file:
                    shutil.copyfileobj(file, stream, storage.BUFFER_BYTES)
                digests[name] = stream.digest
            return digests

        shares = self._group.on_all_ranks(upload)
        return {name: digest for share in shares for name, digest in share.items()}


def _local_folder() -> Path:
    """A folder of this node that its ranks share."""
    return Path(os.environ.get(SCRATCH) or tempfile.gettempdir())


def _find_files(folder: Path) -> list[str]:
    """Names of the files relative to the folder. Raises `StorageError` if one is a link."""
    paths = sorted(path for path in (folder / FILES).rglob("*") if not path.is_dir())
    strange = next((path for path in paths if path.is_symlink() or not path.is_file()), None)
    if strange is not None:
        raise StorageError(f"{strange} {NOT_REGULAR}")
    return [path.relative_to(folder).as_posix() for path in paths]
