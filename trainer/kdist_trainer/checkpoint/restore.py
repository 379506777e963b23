"""Restores the training state from the newest checkpoint that verifies, the same one on every rank.

A checkpoint that does not match its manifest is skipped: it is counted, logged and archived, and
the next older one is tried. One that a disk cannot read is skipped too; but an object store that
fails may be back soon, so the restore fails then. If checkpoints exist but none of them can be
read, the restore fails instead of starting from scratch. It also fails if the newest one is intact
but of a newer version: to continue from an older one would give up what was trained since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kdist_trainer import log
from kdist_trainer.checkpoint import commit, reader
from kdist_trainer.checkpoint.group import CheckpointGroup, broadcast_state, send
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import (
    Checkpoint,
    CheckpointDirectory,
    DamagedCheckpointError,
    Manifest,
    check_digests,
)
from kdist_trainer.checkpoint.reader import LoadedCheckpoint, SavedIndex
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.checkpoint.target import Target, Template
from kdist_trainer.errors import CheckpointMismatchError

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
        """Restore nothing yet.

        Args:
            directory: the checkpoint folder.
            group: the ranks that restore.
            lock: the folder's lock, which says what is valid.
            shared: whether all ranks see one folder.
            by_rank_zero: whether rank 0 alone reads a shared folder, and sends what it reads.
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
        """Load the newest checkpoint that verifies into `tensors`, in place.

        Args:
            tensors: the nested state to fill, or what makes it.
            fingerprint: of the data; empty to accept any.
            check_job: called on every rank with the job stored in the checkpoint; may raise.

        Returns:
            The checkpoint; None if there is none.

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
        for one in self._candidates():
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
        """Find the newest checkpoint whose files verify, in a shared folder.

        Args:
            framework: the framework that has written them.

        Returns:
            The checkpoint, whose files the framework reads itself; None if there is none.

        Raises:
            CheckpointMismatchError: another framework has written it, or there are checkpoints and
                none can be read.
        """
        for one in self._group.on_rank_zero(self._candidates):
            folder = self._directory.root / one.name
            try:
                return _with_retries(
                    partial(
                        self._verify_together,
                        folder,
                        partial(reader.read_state, folder, framework=framework),
                    )
                )
            except self._skipped as error:
                self._record_fallbacks([_fallback(one, error)])
        self._refuse_fresh_start()
        return None

    def _verify_together(
        self, folder: StoragePath, inspect: Callable[[], LoadedCheckpoint]
    ) -> LoadedCheckpoint:
        """Have rank 0 inspect a checkpoint, and all ranks share the verification of its files."""
        found = self._group.on_rank_zero(inspect)
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

        for one in self._group.on_rank_zero(self._candidates):
            try:
                return _with_retries(partial(load, self._directory.root / one.name))
            except self._skipped as error:
                self._record_fallbacks([_fallback(one, error)])
        return None

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
        flat.update(self._group.on_rank_zero(partial(_read_values, folder, found.manifest, others)))
        send(tensors, partial(reader.load_full_tensors, folder, found.manifest), self._group)
        return found

    def _whole(self, flat: dict[str, Any]) -> Mapping[str, Any]:
        """The names and shapes of all ranks' states together: stages of a pipeline have different
        ones.
        """
        if (
            len(set(self._group.gather(hashlib.sha256("\n".join(sorted(flat)).encode()).digest())))
            == 1
        ):
            return flat
        sizes = {
            name: value.shape if isinstance(value, Tensor) else None for name, value in flat.items()
        }
        return {
            name: None if size is None else torch.empty(size, device="meta")
            for part in self._group.gather(sizes)
            for name, size in part.items()
        }

    def _load_by_each(
        self, folder: StoragePath, flat: dict[str, Any], whole: Mapping[str, Any], fingerprint: str
    ) -> LoadedCheckpoint:
        """Have every rank read its part; the ranks share the verification of the files."""
        found = self._verify_together(folder, partial(reader.inspect, folder))
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
                bad.append(
                    _fallback(
                        Checkpoint(
                            chosen.manifest.step, chosen.manifest.epoch, self._directory.root
                        ),
                        error,
                    )
                )
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
        for one in self._candidates():
            if any(one.name == other.name for other in bad):
                continue
            try:
                return _with_retries(partial(_verify, one.path))
            except (DamagedCheckpointError, OSError) as error:
                bad.append(_fallback(one, error))
        return None

    def _candidates(self) -> list[Checkpoint]:
        return self._lock.find_valid()

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
                if one.cause == "corrupt":
                    self._archive(one.name)
        self._group.gather(None)  # a barrier: no rank reads the folder before it is final

    def _archive(self, name: str) -> None:
        for one in self._directory.committed():
            if one.name == name:
                with suppress(OSError):
                    commit.archive_checkpoint(self._directory, one)

    def _refuse_fresh_start(self) -> None:
        def check() -> None:
            left = [*self._candidates(), *self._directory.damaged()]
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


def _read_values(folder: StoragePath, manifest: Manifest, values: dict[str, Any]) -> dict[str, Any]:
    reader.load_tensors(folder, manifest, values, None)
    return values


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
