"""Opens the checkpoint folder for a worker group, and restores the newest checkpoint that
verifies, the same one on every rank.

Opening finds out which ranks share the folder, and locks it. Nobody trains while the ranks of a
group exchange messages, so ranks that continue in place need only two exchanges: rank 0 does all
that it has to do, then every rank reports what it sees. They have their state in memory, so storage
that does not answer in time does not stop them: the call goes on while they train, and the folder
is opened before the next save (`FolderAccess.open_late`). Nothing is saved before, since only an
open folder is locked for their group.

A checkpoint that does not match its manifest is skipped: it is counted, logged and archived, and
the next older one is tried. One that a disk cannot read is skipped too; but an object store that
fails may be back soon, so the restore fails then. If checkpoints exist but none of them can be
read, the restore fails instead of starting from scratch. It also fails if the newest one is intact
but of a newer version: to continue from an older one would give up what was trained since.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from kdist_trainer import log
from kdist_trainer.checkpoint import commit, reader
from kdist_trainer.checkpoint.commit import (
    SaveResult,
    Token,
    cause_of,
    count_cuts,
    read_token,
    record_leftovers,
    remove_token,
    write_token,
)
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock, LockRecord
from kdist_trainer.checkpoint.manifest import (
    Checkpoint,
    CheckpointDirectory,
    DamagedCheckpointError,
    check_digests,
)
from kdist_trainer.checkpoint.reader import LoadedCheckpoint, SavedIndex, Target, Template
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.distributed.checkpoint_group import CheckpointGroup, broadcast_state, send
from kdist_trainer.errors import CheckpointMismatchError, StorageError
from kdist_trainer.processes.threads import BoundedCalls

T = TypeVar("T")
JobCheck = Callable[[Mapping[str, Any]], None]
"""Called with the job stored in a checkpoint; raises `CheckpointMismatchError` if the current job
cannot resume from it.
"""


@dataclass(frozen=True)
class Fallback:
    """A checkpoint that was skipped."""

    step: int
    name: str
    cause: str
    """`corrupt` (it is damaged) or `eio` (the disk failed)."""
    reason: str


class Restore:
    """Restores a state from a checkpoint folder. Collective."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        *,
        group: CheckpointGroup,
        lock: Lock,
        shared: bool,
        by_rank_zero: bool = False,
    ) -> None:
        """Restore nothing yet. `shared` says whether all ranks see one folder, `by_rank_zero`
        whether rank 0 alone reads that, and sends what it reads.
        """
        self._directory = directory
        self._load_one = (
            self._load_by_rank_zero if by_rank_zero and group.size > 1 else self._load_by_each
        )
        self._group = group
        self._lock = lock
        self._shared = shared
        self.fallbacks: list[Fallback] = []
        """Checkpoints that were skipped; the same on every rank."""
        self._job_check: JobCheck | None = None
        self._skipped: tuple[type[Exception], ...] = (
            (DamagedCheckpointError, OSError)
            if isinstance(directory.root, Path)
            else (DamagedCheckpointError,)
        )
        """Errors of a checkpoint after which an older one is tried."""

    def load(
        self,
        tensors: dict[str, Any] | Template,
        *,
        fingerprint: str,
        check_job: JobCheck | None = None,
    ) -> LoadedCheckpoint | None:
        """Load the newest checkpoint that verifies into `tensors`, in place; returns it, or None if
        there is none.

        Args:
            tensors: the nested state to fill, or what makes it.
            fingerprint: of the data; empty to accept any.
            check_job: called on every rank with the job stored in the checkpoint; may raise.

        Raises:
            CheckpointMismatchError: it belongs to other data or another model, another version
                wrote it and this one cannot read it, or there are checkpoints and none can be read.
        """
        self._job_check = check_job
        found = (
            self._load_from_shared_folder(tensors, fingerprint)
            if self._shared
            else self._load_from_local_folders(tensors, fingerprint)
        )
        if found is None:
            self._refuse_fresh_start()
        return found

    def peek(self) -> LoadedCheckpoint | None:
        """The newest checkpoint whose manifest and state verify, the same on every rank."""
        if self._shared:
            return self._group.on_rank_zero(self._newest_state)
        found = [one for one in self._group.on_all_ranks(self._newest_state) if one is not None]
        return max(found, key=lambda one: (one.manifest.epoch, one.manifest.step), default=None)

    def _newest_state(self) -> LoadedCheckpoint | None:
        for one in self._lock.find_valid():
            try:
                return _with_retries(partial(reader.read_state, one.path))
            except CheckpointMismatchError:
                return None  # `load` raises it
            except self._skipped:
                continue
        return None

    def _make_target(
        self, tensors: dict[str, Any] | Template, found: LoadedCheckpoint, index: SavedIndex
    ) -> Target:
        """Make the state to fill; every rank raises what any of them raises."""
        if not callable(tensors):
            return Target(tensors)
        made: list[Target] = []

        def make() -> None:
            made.append(Target(tensors(found, index)))

        self._group.on_all_ranks(make)
        return made[0]

    def find(self, framework: str) -> LoadedCheckpoint | None:
        """Find the newest checkpoint whose files verify, in a shared folder; the framework must
        have written them, and reads them itself. None if there is none. Raises
        `CheckpointMismatchError` if another framework has written it, or there are checkpoints and
        none can be read.
        """
        inspect = partial(reader.read_state, framework=framework)
        found = self._find_first(lambda folder: self._verify_together(folder, inspect))
        if found is None:
            self._refuse_fresh_start()
        return found

    def _find_first(
        self, read: Callable[[StoragePath], LoadedCheckpoint]
    ) -> LoadedCheckpoint | None:
        """Read the newest checkpoint that can be read; None if there is none."""
        for one in self._group.on_rank_zero(self._lock.find_valid):
            try:
                return _with_retries(partial(read, self._directory.root / one.name))
            except self._skipped as error:
                self._record_fallbacks([_fallback(one, error)])
        return None

    def _verify_together(
        self, folder: StoragePath, inspect: Callable[[StoragePath], LoadedCheckpoint]
    ) -> LoadedCheckpoint:
        """Have rank 0 inspect a checkpoint, and all ranks share the verification of its files."""
        found = self._group.on_rank_zero(partial(inspect, folder))
        self._check_job(found)
        share = sorted(found.manifest.files)[self._group.rank :: self._group.size]
        self._group.on_all_ranks(partial(check_digests, folder, found.manifest, share))
        return found

    def _load_from_shared_folder(
        self, tensors: dict[str, Any] | Template, fingerprint: str
    ) -> LoadedCheckpoint | None:
        """Load from a folder that all ranks see: rank 0 chooses the checkpoint."""
        given = None if callable(tensors) else Target(tensors)
        whole = self._whole(given.flat) if given is not None else {}

        def load(folder: StoragePath) -> LoadedCheckpoint:
            target, names = given, whole
            if target is None:
                described = self._group.on_rank_zero(partial(reader.inspect_index, folder))
                target = self._make_target(tensors, *described)
                names = self._whole(target.flat)
            found = self._load_one(folder, target.flat, names, fingerprint)
            target.put_values()
            return found

        return self._find_first(load)

    def _load_by_rank_zero(
        self, folder: StoragePath, flat: dict[str, Any], whole: Mapping[str, Any], fingerprint: str
    ) -> LoadedCheckpoint:
        """Have rank 0 alone read the checkpoint, bucket by bucket, and send it to the others."""
        found = self._group.on_rank_zero(partial(_verify, folder))
        self._check_job(found)
        self._group.on_rank_zero(
            partial(reader.check_fit, folder, found, whole, fingerprint=fingerprint)
        )
        tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in flat.items() if name not in tensors}

        def read_others() -> dict[str, Any]:
            reader.load_tensors(folder, found.manifest, others, None)
            return others

        flat.update(self._group.on_rank_zero(read_others))
        send(tensors, partial(reader.load_full_tensors, folder, found.manifest), self._group)
        return found

    def _whole(self, flat: dict[str, Any]) -> Mapping[str, Any]:
        """The names and shapes of all ranks' states together: stages of a pipeline have different
        ones.
        """
        digest = hashlib.sha256("\n".join(sorted(flat)).encode()).digest()
        if len(set(self._group.gather(digest))) == 1:
            return flat
        return {
            name: None if size is None else torch.empty(size, device="meta")
            for part in self._group.gather(reader.shapes_of(flat))
            for name, size in part.items()
        }

    def _load_by_each(
        self, folder: StoragePath, flat: dict[str, Any], whole: Mapping[str, Any], fingerprint: str
    ) -> LoadedCheckpoint:
        """Have every rank read its part; the ranks share the verification of the files."""
        found = self._verify_together(folder, reader.inspect)
        self._group.on_rank_zero(
            partial(reader.check_fit, folder, found, whole, fingerprint=fingerprint)
        )
        reader.load_tensors(folder, found.manifest, flat, self._group)
        return found

    def _load_from_local_folders(
        self, tensors: dict[str, Any] | Template, fingerprint: str
    ) -> LoadedCheckpoint | None:
        """Load from folders of the nodes' own: the rank with the newest checkpoint that verifies
        reads it for all.
        """
        bad: list[Fallback] = []
        while True:
            answers = self._group.on_all_ranks(lambda: (self._newest_local(bad), bad))
            self._record_fallbacks(
                sorted({one for _, theirs in answers for one in theirs}, key=lambda one: one.name)
            )
            orders = [
                (found.manifest.epoch, found.manifest.step) if found else (-1, -1)
                for found, _ in answers
            ]
            source = orders.index(max(orders))
            chosen = answers[source][0]
            if chosen is None:
                return None
            try:
                index = self._index(chosen, source) if callable(tensors) else {}
                target = self._make_target(tensors, chosen, index)
                read = partial(self._read, chosen, target.flat, fingerprint, source)
                self._group.on_all_ranks(read)
            except (DamagedCheckpointError, OSError) as error:
                manifest, root = chosen.manifest, self._directory.root
                bad.append(_fallback(Checkpoint(manifest.step, manifest.epoch, root), error))
            else:
                broadcast_state(target.flat, self._group, source=source)
                target.put_values()
                return chosen

    def _index(self, chosen: LoadedCheckpoint, source: int) -> SavedIndex:
        """The index of a checkpoint that rank `source` has in its folder."""
        folder = self._directory.root / chosen.manifest.name

        def read() -> SavedIndex:
            return reader.read_index(folder, chosen.manifest) if self._group.rank == source else {}

        return self._group.on_all_ranks(read)[source]

    def _read(
        self, chosen: LoadedCheckpoint, flat: dict[str, Any], fingerprint: str, source: int
    ) -> None:
        self._check_job(chosen)
        if self._group.rank == source:
            folder = self._directory.root / chosen.manifest.name
            reader.check_fit(folder, chosen, flat, fingerprint=fingerprint)
            reader.load_tensors(folder, chosen.manifest, flat, None)

    def _check_job(self, found: LoadedCheckpoint) -> None:
        if self._job_check is not None and found.job:
            self._job_check(found.job)

    def _newest_local(self, bad: list[Fallback]) -> LoadedCheckpoint | None:
        """The newest checkpoint of this rank's folder that verifies; adds the others to `bad`."""
        for one in self._lock.find_valid():
            if any(one.name == other.name for other in bad):
                continue
            try:
                return _with_retries(partial(_verify, one.path))
            except (DamagedCheckpointError, OSError) as error:
                bad.append(_fallback(one, error))
        return None

    def _record_fallbacks(self, fallbacks: list[Fallback]) -> None:
        """Count and log skipped checkpoints, and archive the damaged ones; unreadable ones stay."""
        new = [one for one in fallbacks if one not in self.fallbacks]
        self.fallbacks += new
        if self._group.is_rank_zero:
            for one in new:
                log.warn(
                    "checkpoint-fallback",
                    step=one.step,
                    cause=one.cause,
                    reason=f"{one.name}: {one.reason}",
                )
                with suppress(OSError):
                    RunLedger(self._directory.root).append(
                        "fallback", step=one.step, cause=one.cause, reason=one.reason
                    )
                if one.cause != "corrupt":
                    continue
                for found in self._directory.committed():
                    if found.name == one.name:
                        with suppress(OSError):
                            commit.archive_checkpoint(self._directory, found)
        self._group.gather(None)  # a barrier: no rank reads the folder before it is final

    def _refuse_fresh_start(self) -> None:
        def check() -> None:
            left = [*self._lock.find_valid(), *self._directory.damaged()]
            if self.fallbacks or left:
                reasons = "; ".join(f"{one.name}: {one.reason}" for one in self.fallbacks[:3])
                raise CheckpointMismatchError(
                    f"no checkpoint in {self._directory.root} can be read "
                    f"({reasons or 'all were archived as damaged'}); "
                    "restore an intact copy, or start again with --fresh or another folder"
                )

        self._group.on_rank_zero(check)


def _verify(folder: StoragePath) -> LoadedCheckpoint:
    found = reader.inspect(folder)
    check_digests(folder, found.manifest, found.manifest.files)
    return found


def _with_retries(work: Callable[[], T]) -> T:
    """Call `work`, twice if the disk fails: a hiccup must not cost an acknowledged checkpoint."""
    try:
        return work()
    except OSError:
        return work()


def _fallback(checkpoint: Checkpoint, error: Exception) -> Fallback:
    return Fallback(
        checkpoint.step,
        checkpoint.name,
        "corrupt" if isinstance(error, DamagedCheckpointError) else "eio",
        str(error),
    )


SHARDED: Final = (
    "and each holds a part of the model: use a volume that all nodes mount (ReadWriteMany), or "
    "strategy ddp"
)
"""Why ranks that hold parts of the state must share the folder, and what to do otherwise."""


class LockRequest(NamedTuple):
    """Who locks a folder."""

    run_id: str
    generation: int
    take_over: bool
    """Whether to lock a folder that another run holds."""
    spared: Collection[str] = ()
    """Names of the folders that ranks of former groups still write to."""


class OpenFolder(NamedTuple):
    """A checkpoint folder that this worker group has locked.

    Attributes:
        sees: By rank, whether its folder is rank 0's.
        epoch: Of the group.
        name: Of the group in this folder, for its temporary files; random.
        newest: For ranks that continue in place, the checkpoint that theirs follow.
        may_be_done: Whether a folder may say that the run has ended.
        cuts: For ranks that start, the saves in a row that lost ranks have cut.
    """

    sees: list[bool]
    epoch: int
    name: str
    newest: Checkpoint | None = None
    may_be_done: bool = True
    cuts: int = 0


class FolderAccess:
    """Opens the folder, late if need be. Collective but for its properties."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        group: CheckpointGroup,
        request: LockRequest,
        *,
        must_be_shared: str | None,
        is_known: bool,
    ) -> None:
        """Open the folder. `must_be_shared` says why all ranks must share it, and what to do
        otherwise; None if they need not. `is_known` says whether ranks of a former group, which has
        used the folder, continue in place: then storage that fails is `trouble`, and no error.

        Raises:
            CheckpointMismatchError: the folder belongs to another run or lacks what is needed.
            LockLostError: a later group of this run has locked it.
            StorageError: it cannot be written.
        """
        self.lock = Lock(directory.root)
        self._directory = directory
        self._group = group
        self._request = request
        description = f"the checkpoint folder {directory.root}"
        self._begin_calls, self._calls = BoundedCalls(description), BoundedCalls(description)
        self.trouble: StorageError | None = None
        """Why the folder is not open yet, so that nothing can be saved or restored."""
        self.opened = OpenFolder([True] * group.size, epoch=0, name="")
        """What is known of the folder; as long as it is not open, nothing."""
        if not is_known:
            self.opened = self._open(must_be_shared)
            return
        try:
            self.opened = self._continue_in_place()
        except StorageError as error:
            self.trouble = error
            if group.is_rank_zero:
                log.warn("storage-unavailable", message=f"{error}; ranks go on in place")

    def open_late(self) -> None:
        """Open the folder, which has failed so far. Raises as the constructor does."""
        try:
            self.opened = self._continue_in_place()
        except StorageError as error:
            self.trouble = error
            raise
        self.trouble = None

    def refuse(self, step: int, error: StorageError) -> SaveResult:
        """Log that a save of `step` has failed before anything was written, or after all was;
        returns its result.
        """
        result = self.describe(step, error)
        if self._group.is_rank_zero:
            log.warn("checkpoint-failed", step=step, cause=result.cause, error=result.error)
        return result

    @staticmethod
    def describe(step: int, error: StorageError) -> SaveResult:
        """The result of a save of `step` that fails with this error."""
        cause = cause_of(error.__cause__ or error)
        return SaveResult(step, ok=False, cause=cause, error=str(error))

    @property
    def has_answered(self) -> bool:
        """Whether rank 0, which asks, would find the folder open that did not answer in time."""
        return self.trouble is not None and self._begin_calls.has_answered

    @property
    def shared(self) -> bool:
        """Whether all ranks see one folder."""
        return all(self.opened.sees)

    @property
    def lock_record(self) -> LockRecord | None:
        """What rank 0 holds the folder by; None while it is not open."""
        return self.lock.mine if self.trouble is None else None

    def set_base(self, base: Checkpoint | None) -> None:
        """Fence off what earlier groups commit from now on; `base` is what this group started from.
        Raises `StorageError` or `LockLostError`.
        """
        self._on_lock(lambda: self.lock.set_base(base))

    def reopen(self) -> None:
        """Mark the run as not ended, by removing DONE. Raises `StorageError`."""
        if not self.opened.may_be_done or self.trouble is not None:
            return

        def remove() -> None:
            if self._group.is_rank_zero or not self.opened.sees[self._group.rank]:
                self._directory.remove_done()

        try:
            self._group.on_all_ranks(remove)
        except OSError as error:
            raise StorageError(
                f"cannot remove DONE from {self._directory.root}: {error}"
            ) from error

    def end_run(self, document: dict[str, Any]) -> SaveResult:
        """Write DONE in the folder of every node, after the last checkpoint, which `document` is
        about.
        """

        def write() -> None:
            if self._group.is_rank_zero or not self.opened.sees[self._group.rank]:
                self._directory.write_done(document)

        try:
            _with_retries(lambda: self._group.on_all_ranks(write))
        except OSError as error:
            problem = StorageError(f"cannot write DONE to {self._directory.root}: {error}")
            problem.__cause__ = error
            return self.refuse(document["step"], problem)
        return SaveResult(document["step"], ok=True)

    def release(self) -> None:
        """Let any run use the folder."""
        if self._group.is_rank_zero and self.trouble is None:
            self.lock.release()

    def _open(self, must_be_shared: str | None) -> OpenFolder:
        """Open the folder for ranks that start or restart. Raises as the constructor does."""
        sees = self._find_sharing()
        self._check_shared(sees, must_be_shared)
        others = [0] if all(sees) else self._group.gather(self._find_epoch())

        def begin() -> OpenFolder:
            epoch = self._acquire(at_least=max(others) + 1)
            if not isinstance(self._directory.root, Path):
                record_leftovers(self._directory, self.lock, spared=self._request.spared)
            cuts = 0
            with suppress(OSError):
                cuts = count_cuts(RunLedger(self._directory.root).events())
            return OpenFolder(sees, epoch, secrets.token_hex(4), cuts=cuts)

        return self._on_lock(begin)

    def _continue_in_place(self) -> OpenFolder:
        """Open the folder for ranks of which some have used it in their former group, whose state
        they have in memory: what they save follows the newest checkpoint.

        Raises as the constructor does, and `StorageError` from a `TimeoutError` if the storage does
        not answer within seconds. It may be called again then, and goes on where it was.
        """
        group = self._group
        token, epoch, newest, name = self._on_lock(lambda: self._begin_calls.resume(self._begin))
        try:
            every = group.on_all_ranks(lambda: self._calls.call(lambda: self._inspect(token)))
        except OSError as error:
            raise StorageError(f"cannot read {self._directory.root}: {error}") from error
        finally:
            if group.is_rank_zero:
                with suppress(OSError):
                    self._calls.call(lambda: remove_token(self._directory.root, token))
        sees = [one for one, _, _ in every]
        self._check_shared(sees, None)
        others = max((found for is_seen, found, _ in every if not is_seen), default=0)
        if others >= epoch:
            epoch = others + 1
            self._on_lock(lambda: self._calls.call(lambda: self.lock.raise_epoch(epoch)))
        return OpenFolder(sees, epoch, name, newest, any(is_done for _, _, is_done in every))

    def _inspect(self, token: Token) -> tuple[bool, int, bool]:
        """Whether this rank sees rank 0's folder, its highest epoch, and whether the run is done by
        it.
        """
        is_done = self._directory.done() is not None
        return read_token(self._directory.root, token), self._find_epoch(), is_done

    def _on_lock(self, work: Callable[[], T]) -> T:
        """Do something to the lock on rank 0, and return its result on every rank. Raises what it
        raises, and `StorageError` for an `OSError`.
        """
        try:
            return self._group.on_rank_zero(work)
        except OSError as error:
            raise StorageError(
                f"cannot write the lock of {self._directory.root}: {error}"
            ) from error

    def _begin(self) -> tuple[Token, int, Checkpoint | None, str]:
        """Rank 0's part of `_continue_in_place`."""
        token = write_token(self._directory.root)
        try:
            if self.lock.mine is None:
                epoch = self._acquire(at_least=0)
            else:  # by an attempt that the storage has failed later
                self.lock.check()
                epoch = self.lock.mine.epoch
            newest = self.lock.find_newest()
            self.lock.set_base(newest)
        except BaseException:
            remove_token(self._directory.root, token)
            raise
        return token, epoch, newest, secrets.token_hex(4)

    def _acquire(self, *, at_least: int) -> int:
        """Lock the folder; returns the epoch."""
        request = self._request
        record = self.lock.acquire(
            run_id=request.run_id,
            generation=request.generation,
            take_over=request.take_over,
            at_least=at_least,
        )
        if isinstance(self._directory.root, Path):
            record_leftovers(self._directory, self.lock, spared=request.spared)
            commit.clean_stale(self._directory, before=record.epoch + 1, spared=request.spared)
        # in an object store it would take long: the writer does so before it saves
        return record.epoch

    def _find_epoch(self) -> int:
        """The highest epoch of a checkpoint in this rank's folder."""
        return max((one.epoch for one in self._directory.committed()), default=0)

    def _find_sharing(self) -> list[bool]:
        """For each rank, whether it sees rank 0's folder. Also checks that the file system has what
        checkpoints need. Raises as the constructor does.
        """
        root, group = self._directory.root, self._group
        try:
            token = group.on_rank_zero(lambda: write_token(root, is_new=True))
        except OSError as error:
            raise StorageError(f"cannot write to the checkpoint folder {root}: {error}") from error
        try:
            return group.on_all_ranks(lambda: read_token(root, token))
        finally:
            if group.is_rank_zero:
                remove_token(root, token)

    def _check_shared(self, sees: list[bool], must_be_shared: str | None) -> None:
        if all(sees):
            return
        root = self._directory.root
        if must_be_shared is not None:
            raise CheckpointMismatchError(
                f"the ranks do not share the checkpoint folder {root}, {must_be_shared}"
            )
        if self._group.is_rank_zero:
            log.warn(
                "storage-not-shared",
                message=(
                    f"{root} is not one folder for all ranks: rank 0 writes "
                    "everything and broadcasts on load"
                ),
            )
