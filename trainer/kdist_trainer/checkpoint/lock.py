"""Who may commit checkpoints: claims that only ever grow, so that a writer that was paused can
never win. Free of torch.

`<root>/lock/` holds one file per claim, named by its epoch and created exclusively; the highest
epoch is the holder. There is nothing to unlock and nothing that a dead or sleeping holder could
block: a later group claims a higher number and goes on at once, and every writer looks again before
it commits. An earlier writer may still be caught between that look and its rename. Therefore a
claim also notes the checkpoint that its group started from, its *base*: what an earlier epoch
brings to light beyond that base came too late and counts for nothing.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint import durable_files
from kdist_trainer.checkpoint.layout import Checkpoint, parse_name
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import CheckpointMismatchError, KdistTrainerError

_CLAIM = re.compile(r"e(\d{8,})\.json")
_KEEP = 3
_FENCES = 100


class LockLostError(KdistTrainerError):
    """A later group of the run holds the folder; this one has been given up and must end."""

    cause = Cause.NODE_LOST
    code = Exit.PEERS_LOST


@dataclass(frozen=True)
class LockRecord:
    """One group's right to write.

    `fences` are the bases of this group and of those before it: epoch of the group, name of the
    checkpoint or "" for none.
    """

    epoch: int
    run_id: str
    holder: str
    host: str = ""
    time: float = 0.0
    released: bool = False
    fences: tuple[tuple[int, str], ...] = ()


class Lock:
    """The lock of one checkpoint folder, as this process sees it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "lock"
        self.mine: LockRecord | None = None

    def acquire(self, *, run_id: str, epoch: int, take_over: bool = False) -> LockRecord:
        """Claim the folder for this run. A higher epoch of the same run takes over at once.

        Another run's folder is refused with `CheckpointMismatchError` unless that run released it
        or `take_over` is given; the epoch then goes on from its last, because epochs must grow
        within a folder. Raises `LockLostError` if this or a higher epoch of the same run is there
        already, `OSError` if the disk fails.
        """
        epochs, last = self._epochs(), self.last()
        highest = epochs[-1] if epochs else 0
        if last is not None and last.run_id != run_id:
            if not (last.released or take_over):
                raise CheckpointMismatchError(
                    f"checkpoints in {self.folder.parent} belong to run {last.run_id} (on "
                    f"{last.host}), not to {run_id}: "
                    "wait until it has ended, choose another folder, or use --take-over"
                )
            epoch = max(epoch, highest + 1)
        if epoch == highest and last is not None and last.epoch == epoch and last.released:
            self._remove(epoch)
        elif epoch <= highest:
            raise LockLostError(
                f"epoch {highest} of run {run_id} holds {self.folder.parent}, this group "
                f"is of epoch {epoch}"
            )
        claim = LockRecord(
            epoch, run_id, secrets.token_hex(8), socket.gethostname(), round(time.time(), 3)
        )
        if last is not None:
            claim = replace(claim, fences=last.fences)
        self._create(claim)
        self.check()
        return claim

    def check(self) -> None:
        """Make sure that the claim still stands. Raises `LockLostError`, or `OSError` if the disk
        fails.
        """
        if self.mine is None:
            raise LockLostError(f"{self.folder.parent} is not claimed by this process")
        epochs = self._epochs()
        if not epochs or epochs[-1] != self.mine.epoch:
            holder = f"epoch {epochs[-1]} has taken it over" if epochs else "its lock is gone"
            raise LockLostError(f"epoch {self.mine.epoch} lost {self.folder.parent}: {holder}")
        last = self.last()
        if last is None or last.holder != self.mine.holder:
            raise LockLostError(
                f"epoch {self.mine.epoch} of {self.folder.parent} was claimed a second time"
            )

    def set_base(self, checkpoint: Checkpoint | None) -> None:
        """Note what this group starts from. Raises `OSError` or `LockLostError`."""
        self.check()
        assert self.mine is not None  # noqa: S101 - check() raised otherwise
        base = checkpoint.name if checkpoint else ""
        # A fence says all that an older one with the same base said.
        older = [fence for fence in self.mine.fences if fence[1] != base]
        self._rewrite(fences=(*older, (self.mine.epoch, base))[-_FENCES:])
        self._prune()

    def release(self) -> None:
        """Let any other run have the folder. Does nothing if the claim was lost."""
        with suppress(LockLostError, OSError):
            self._rewrite(released=True)
        self.mine = None

    def last(self) -> LockRecord | None:
        """The newest claim that has its content; a crash may have left a higher one empty. Raises
        `OSError`.
        """
        for epoch in reversed(self._epochs()):
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
                document: dict[str, Any] = json.loads(self._path(epoch).read_bytes())
                fences = tuple((int(epoch), str(base)) for epoch, base in document.pop("fences"))
                return LockRecord(**document, fences=fences)
        return None

    def valid(self, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
        """Those checkpoints that no writer brought in after it had been superseded, in the order
        given. Raises `OSError`.
        """
        last = self.last()
        fences = (
            [(epoch, parse_name(base) or (-1, -1)) for epoch, base in last.fences]
            if last is not None
            else []
        )
        return [
            one
            for one in checkpoints
            if all(one.epoch >= epoch or one.order <= base for epoch, base in fences)
        ]

    def _epochs(self) -> list[int]:
        try:
            names = [entry.name for entry in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in map(_CLAIM.fullmatch, names) if match)

    def _path(self, epoch: int) -> Path:
        return self.folder / f"e{epoch:08d}.json"

    def _create(self, claim: LockRecord) -> None:
        durable_files.make_folder(self.folder, durable=True)
        try:
            durable_files.write_new(self._path(claim.epoch), _to_bytes(claim), exclusive=True)
        except FileExistsError as error:
            raise LockLostError(
                f"epoch {claim.epoch} of {self.folder.parent} was claimed at the same moment"
            ) from error
        except OSError:
            self._remove(claim.epoch)  # ours, but without its content
            raise
        durable_files.sync_folder(self.folder)
        self.mine = claim

    def _rewrite(self, **changes: Any) -> None:
        self.check()
        assert self.mine is not None  # noqa: S101 - check() raised otherwise
        self.mine = replace(self.mine, **changes)
        durable_files.replace(self._path(self.mine.epoch), _to_bytes(self.mine))

    def _remove(self, epoch: int) -> None:
        with suppress(FileNotFoundError):
            durable_files.remove(self._path(epoch))

    def _prune(self) -> None:
        for epoch in self._epochs()[:-_KEEP]:
            with suppress(OSError):
                self._remove(epoch)


def _to_bytes(claim: LockRecord) -> bytes:
    return json.dumps(asdict(claim)).encode() + b"\n"
