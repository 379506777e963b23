"""Reading one checkpoint's content: torch's DCP, with everything that it would unpickle checked or
restricted.

Choosing what to resume from: the newest checkpoint that verifies, the same one on every rank.

A checkpoint that is not what its manifest says is passed over: counted, told, and set aside as
evidence; the one before it is next. Where checkpoints exist and none can be read, the training does
not quietly begin anew: that is for a person to say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from kdist_trainer import log
from kdist_trainer.checkpoint import commit
from kdist_trainer.checkpoint.layout import (
    STATE,
    Checkpoint,
    CheckpointDirectory,
    DamagedCheckpointError,
    Manifest,
    check_digests,
    read_checked,
    read_manifest,
)
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.peers import CheckpointGroup, broadcast_state, send
from kdist_trainer.checkpoint.safe_unpickler import METADATA, read_metadata
from kdist_trainer.errors import CheckpointMismatchError

_TOLD = 3


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose manifest, state and index are sound; its digests are checked apart, since
    that takes long.
    """

    manifest: Manifest
    state: dict[str, Any]
    job: dict[str, Any] = field(default_factory=dict)
    """The job that it is of; empty where the checkpoint does not say."""


class _Reader(FileSystemReader):
    """DCP's reader, with the index compared with its digest and read by the restricted
    unpickler.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        metadata = load_metadata(Path(self.path), self._manifest)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Planner(DefaultLoadPlanner):
    """DCP's plan of a flat state, with small values read by `weights_only`, which DCP's own does
    not do.
    """

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def load_metadata(folder: Path, manifest: Manifest) -> Metadata:
    """DCP's index of a checkpoint, verified. Raises `DamagedCheckpointError` or `OSError`."""
    return read_metadata(read_checked(folder, METADATA, manifest), manifest.files)


def inspect(folder: Path) -> LoadedCheckpoint:
    """Check all of a checkpoint but its files' digests. Raises `DamagedCheckpointError` or
    `OSError`; runs nothing that lies in it.
    """
    manifest = read_manifest(folder)
    load_metadata(folder, manifest)
    try:
        document = json.loads(read_checked(folder, STATE, manifest))
        state, job = document["state"], document.get("job", {})
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{STATE} holds no state") from error
    if not isinstance(state, dict) or not isinstance(job, dict):
        raise DamagedCheckpointError(f"{STATE} holds no state")
    return LoadedCheckpoint(manifest, state, job)


def check_fit(
    folder: Path, found: LoadedCheckpoint, flat: Mapping[str, Any], *, fingerprint: str
) -> None:
    """Compare a checkpoint with the data and the model that it is to be loaded into. Raises
    `CheckpointMismatchError`, saying what differs.

    Without a `fingerprint` the data are not compared. Raises `DamagedCheckpointError` or `OSError`
    when the index cannot be read any more.
    """
    theirs = found.state.get("fingerprint", "")
    if fingerprint and theirs != fingerprint:
        raise CheckpointMismatchError(
            f"checkpoint {folder} was trained on other data, of fingerprint {theirs!r} "
            f"instead of {fingerprint!r}; "
            "give the job a checkpoint folder of its own, or --fresh"
        )
    saved = load_metadata(folder, found.manifest).state_dict_metadata
    problems = [f"{name} is missing" for name in flat if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in flat]
    for name, value in flat.items():
        entry = saved.get(name)
        if (
            isinstance(value, Tensor)
            and isinstance(entry, TensorStorageMetadata)
            and entry.size != value.shape
        ):
            problems.append(f"{name} is {tuple(entry.size)} instead of {tuple(value.shape)}")
        elif entry is not None and isinstance(value, Tensor) != isinstance(
            entry, TensorStorageMetadata
        ):
            problems.append(f"{name} is of another kind")
    if problems:
        more = f" and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
        raise CheckpointMismatchError(
            f"checkpoint {folder} is of another model or optimizer: "
            f"{'; '.join(problems[:_TOLD])}{more}"
        )


def load_tensors(
    folder: Path, manifest: Manifest, flat: dict[str, Any], peers: CheckpointGroup | None
) -> None:
    """Read the flat state in place, all ranks together, or without `peers` this rank alone.

    Raises `DamagedCheckpointError` when the content cannot be read, `OSError` when the disk did not
    answer; the state may be half read then.
    """
    group = peers.group if peers is not None else None
    reader = _Reader(folder, manifest)
    try:
        state_dict_loader.load(
            flat,
            storage_reader=reader,
            planner=_Planner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        errors = [wrapped[0] for wrapped in error.failures.values()]
        root = next((one for one in errors if isinstance(one, OSError)), errors[0])
        if isinstance(root, OSError | DamagedCheckpointError):
            raise root from None
        raise DamagedCheckpointError(
            f"its content cannot be read: {type(root).__name__}: {root}"
        ) from None


def load_full_tensors(folder: Path, manifest: Manifest, names: Sequence[str]) -> dict[str, Tensor]:
    """These tensors of a checkpoint whole, on the CPU, read by this rank alone. Raises
    `DamagedCheckpointError` or `OSError`.
    """
    saved = load_metadata(folder, manifest).state_dict_metadata
    flat: dict[str, Any] = {}
    for name in names:
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedCheckpointError(f"{name} is no tensor in {METADATA}")
        flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load_tensors(folder, manifest, flat, None)
    return flat


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
        self._peers.on_leader(partial(check_fit, folder, found, whole, fingerprint=fingerprint))
        tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in flat.items() if name not in tensors}
        flat.update(self._peers.on_leader(partial(_read_values, folder, found.manifest, others)))
        send(tensors, partial(load_full_tensors, folder, found.manifest), self._peers)
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
        found = self._peers.on_leader(partial(inspect, folder))
        self._ask(found)
        share = sorted(found.manifest.files.items())[self._peers.rank :: self._peers.size]
        self._peers.everywhere(partial(check_digests, folder, share))
        self._peers.on_leader(partial(check_fit, folder, found, whole, fingerprint=fingerprint))
        load_tensors(folder, found.manifest, flat, self._peers)
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
            check_fit(folder, chosen, flat, fingerprint=fingerprint)
            load_tensors(folder, chosen.manifest, flat, None)

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
    found = inspect(folder)
    check_digests(folder, found.manifest.files.items())
    return found


def _read_values(folder: Path, manifest: Manifest, values: dict[str, Any]) -> dict[str, Any]:
    load_tensors(folder, manifest, values, None)
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
