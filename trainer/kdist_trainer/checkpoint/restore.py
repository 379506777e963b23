"""Restores the training state from the newest checkpoint that verifies, the same one on every rank.

A checkpoint that does not match its manifest is skipped: it is counted, logged and kept as
evidence, and the next older one is tried. If checkpoints exist but none of them can be read, the
restore fails instead of starting from scratch.
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
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

from kdist_trainer import log
from kdist_trainer.checkpoint import commit, reader
from kdist_trainer.checkpoint.layout import (
    Checkpoint,
    CheckpointDirectory,
    DamagedCheckpointError,
    Manifest,
    check_digests,
)
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.peers import CheckpointGroup, broadcast_state, send
from kdist_trainer.checkpoint.reader import LoadedCheckpoint
from kdist_trainer.errors import CheckpointMismatchError

T = TypeVar("T")
Judge = Callable[[Mapping[str, Any]], None]
"""Is shown the job that a checkpoint is of, and raises `CheckpointMismatchError` where the present
job cannot go on from it.
"""


@dataclass(frozen=True)
class Fallback:
    """A checkpoint that was passed over; `cause` is corrupt (it is damaged) or eio (the disk did
    not give it).
    """

    step: int
    name: str
    cause: str
    reason: str


class Restore:
    """Restores a state from a checkpoint folder. Collective over `peers`; `fallbacks` is the same
    on every rank.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        *,
        peers: CheckpointGroup,
        lock: Lock,
        shared: bool,
        by_leader: bool = False,
    ) -> None:
        """`by_leader`: rank 0 reads a folder that all share, and sends what it reads."""
        self._directory = directory
        self._load_together = (
            self._load_from_leader if by_leader and peers.size > 1 else self._load_by_each
        )
        self._peers = peers
        self._lock = lock
        self._shared = shared
        self.fallbacks: list[Fallback] = []
        self._judge: Judge | None = None

    def load(
        self, tensors: dict[str, Any], *, fingerprint: str, judge: Judge | None = None
    ) -> LoadedCheckpoint | None:
        """Load the newest checkpoint that verifies into `tensors`, in place; None when there is
        none at all.

        Raises `CheckpointMismatchError` when it belongs to other data or another model, or when
        there are checkpoints but none is readable, and whatever `judge` raises, which is asked on
        every rank.
        """
        self._judge = judge
        flat, paths = flatten_state_dict(tensors)
        found = (
            self._load_shared(flat, fingerprint)
            if self._shared
            else self._load_apart(flat, fingerprint)
        )
        if found is None:
            self._refuse_to_begin_anew()
            return None
        for name, value in flat.items():
            if not isinstance(value, Tensor):
                set_element(tensors, paths[name], value)
        return found

    def _load_shared(self, flat: dict[str, Any], fingerprint: str) -> LoadedCheckpoint | None:
        """All ranks see one folder: rank 0 chooses, the digests are checked by all, each its
        share.
        """
        whole = self._whole(flat)
        for one in self._peers.on_leader(self._candidates):
            try:
                return _with_retries(
                    partial(
                        self._load_together,
                        self._directory.root / one.name,
                        flat,
                        whole,
                        fingerprint,
                    )
                )
            except (DamagedCheckpointError, OSError) as error:
                self._pass_over([_fallback(one, error)])
        return None

    def _load_from_leader(
        self, folder: Path, flat: dict[str, Any], whole: Mapping[str, Any], fingerprint: str
    ) -> LoadedCheckpoint:
        """Only rank 0 touches the disk, a bucket at a time; the others get what it read."""
        found = self._peers.on_leader(partial(_verify, folder))
        self._ask(found)
        self._peers.on_leader(
            partial(reader.check_fit, folder, found, whole, fingerprint=fingerprint)
        )
        tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in flat.items() if name not in tensors}
        flat.update(self._peers.on_leader(partial(_read_values, folder, found.manifest, others)))
        send(tensors, partial(reader.load_full_tensors, folder, found.manifest), self._peers)
        return found

    def _whole(self, flat: dict[str, Any]) -> Mapping[str, Any]:
        """What all ranks hold together, without its values: the stages of a pipeline have different
        names in their states.
        """
        if (
            len(set(self._peers.gather(hashlib.sha256("\n".join(sorted(flat)).encode()).digest())))
            == 1
        ):
            return flat
        sizes = {
            name: value.shape if isinstance(value, Tensor) else None for name, value in flat.items()
        }
        return {
            name: None if size is None else torch.empty(size, device="meta")
            for part in self._peers.gather(sizes)
            for name, size in part.items()
        }

    def _load_by_each(
        self, folder: Path, flat: dict[str, Any], whole: Mapping[str, Any], fingerprint: str
    ) -> LoadedCheckpoint:
        found = self._peers.on_leader(partial(reader.inspect, folder))
        self._ask(found)
        share = sorted(found.manifest.files.items())[self._peers.rank :: self._peers.size]
        self._peers.everywhere(partial(check_digests, folder, share))
        self._peers.on_leader(
            partial(reader.check_fit, folder, found, whole, fingerprint=fingerprint)
        )
        reader.load_tensors(folder, found.manifest, flat, self._peers)
        return found

    def _load_apart(self, flat: dict[str, Any], fingerprint: str) -> LoadedCheckpoint | None:
        """Each node has a folder of its own: the rank that holds the newest sound checkpoint reads
        it for all.
        """
        bad: list[Fallback] = []
        while True:
            own = self._newest_of_mine(bad)
            answers = self._peers.gather((own, bad))
            self._pass_over(
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
                self._peers.everywhere(partial(self._read, chosen, flat, fingerprint, source))
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
                broadcast_state(flat, self._peers, source=source)
                return chosen

    def _read(
        self, chosen: LoadedCheckpoint, flat: dict[str, Any], fingerprint: str, source: int
    ) -> None:
        self._ask(chosen)
        if self._peers.rank == source:
            folder = self._directory.root / chosen.manifest.name
            reader.check_fit(folder, chosen, flat, fingerprint=fingerprint)
            reader.load_tensors(folder, chosen.manifest, flat, None)

    def _ask(self, found: LoadedCheckpoint) -> None:
        if self._judge is not None and found.job:
            self._judge(found.job)

    def _newest_of_mine(self, bad: list[Fallback]) -> LoadedCheckpoint | None:
        """The newest checkpoint of this rank's own folder that verifies; those that do not are
        added to `bad`.
        """
        for one in self._candidates():
            if any(one.name == other.name for other in bad):
                continue
            try:
                return _with_retries(partial(_verify, one.path))
            except (DamagedCheckpointError, OSError) as error:
                bad.append(_fallback(one, error))
        return None

    def _candidates(self) -> list[Checkpoint]:
        return self._lock.valid(self._directory.committed())

    def _pass_over(self, fallbacks: list[Fallback]) -> None:
        """Count and tell what was passed over, and set aside what is damaged; what only could not
        be read stays in place.
        """
        new = [one for one in fallbacks if one not in self.fallbacks]
        self.fallbacks += new
        if self._peers.is_leader:
            for one in new:
                log.warn(
                    "checkpoint-fell-back",
                    step=one.step,
                    cause=one.cause,
                    reason=f"{one.name}: {one.reason}",
                )
                with suppress(OSError):
                    RunLedger(self._directory.root).append(
                        "fallback", step=one.step, cause=one.cause, reason=one.reason
                    )
                if one.cause == "corrupt":
                    self._set_aside(one.name)
        self._peers.gather(None)  # nobody goes on before the folder is as it will be

    def _set_aside(self, name: str) -> None:
        for one in self._directory.committed():
            if one.name == name:
                with suppress(OSError):
                    commit.archive_checkpoint(one)

    def _refuse_to_begin_anew(self) -> None:
        def look() -> None:
            left = [*self._candidates(), *self._directory.damaged()]
            if self.fallbacks or left:
                reasons = "; ".join(f"{one.name}: {one.reason}" for one in self.fallbacks[:3])
                raise CheckpointMismatchError(
                    f"no checkpoint in {self._directory.root} can be read "
                    f"({reasons or 'all were set aside as damaged'}); "
                    "put a sound copy back, or begin anew with --fresh or another folder"
                )

        self._peers.on_leader(look)


def _verify(folder: Path) -> LoadedCheckpoint:
    found = reader.inspect(folder)
    check_digests(folder, found.manifest.files.items())
    return found


def _read_values(folder: Path, manifest: Manifest, values: dict[str, Any]) -> dict[str, Any]:
    reader.load_tensors(folder, manifest, values, None)
    return values


def _with_retries(work: Callable[[], T]) -> T:
    """Do `work`, again if the disk did not answer: going one back for a hiccup would cost what had
    been acknowledged.
    """
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
