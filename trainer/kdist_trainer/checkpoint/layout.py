"""Names inside a checkpoint folder, and what is there. Free of torch: agents and the command line read it too.

- `step-00001200-e3/`: a committed checkpoint, step 1200, written by the group of epoch 3
- `step-00001300-e3.tmp-9f2c-4/`: one being written, or litter of a writer that died
- `step-00001100-e2.damaged/`: one that did not verify, kept as evidence
- `LATEST`: name of the newest committed checkpoint; `DONE`: the run has ended
- `lock/`, `ledger/`: who may write; what has happened
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint import files

_NAME = re.compile(r"step-(\d{8,})-e(\d+)")
_TEMPORARY = re.compile(r"step-(\d{8,})-e(\d+)\.tmp-[\w-]+")
_DAMAGED = re.compile(r"step-(\d{8,})-e(\d+)\.damaged(-\d+)?")

MANIFEST = "manifest.json"
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint by its name: the optimizer step it holds, the epoch of its writer, and where it lies."""

    step: int
    epoch: int
    path: Path

    @property
    def name(self) -> str:
        return name_of(self.step, self.epoch)

    @property
    def order(self) -> tuple[int, int]:
        """Newer is larger. The epoch goes first: whatever a later group commits replaces all that earlier groups left."""
        return (self.epoch, self.step)


def name_of(step: int, epoch: int) -> str:
    """Name of a committed checkpoint's folder."""
    return f"step-{step:08d}-e{epoch}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Epoch and step of a committed checkpoint's name, in the order that sorts; None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[2]), int(match[1])) if match else None


class CheckpointDirectory:
    """A checkpoint folder as it stands on the disk. Reading never changes it; a folder that is not there is empty."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def committed(self) -> list[Checkpoint]:
        """Committed checkpoints, newest first. They carry a committed name; whether they verify is the reader's question."""
        return self._listed(_NAME)

    def temporary(self) -> list[Checkpoint]:
        """Folders of saves under way, or left behind by writers that died."""
        return self._listed(_TEMPORARY)

    def damaged(self) -> list[Checkpoint]:
        """Checkpoints that did not verify and were set aside, newest first."""
        return self._listed(_DAMAGED)

    def loose_files(self) -> list[Path]:
        """Files of a moment, which a crash may have left: tokens of the storage probe, halves of atomic replacements."""
        return [
            path for pattern in ("probe-*", "LATEST.tmp-*", "DONE.tmp-*") for path in self.root.glob(pattern) if path.is_file()
        ]

    def latest(self) -> Path | None:
        """The checkpoint that LATEST names if it is there, else the newest committed one."""
        named = self.named()
        if named is not None and (self.root / named).is_dir():
            return self.root / named
        committed = self.committed()
        return committed[0].path if committed else None

    def named(self) -> str | None:
        """The name that LATEST holds; None when there is none or it is no checkpoint's name."""
        try:
            name = (self.root / "LATEST").read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return name if parse_name(name) else None

    def write_latest(self, name: str) -> None:
        """Let LATEST name this checkpoint, atomically. Raises `OSError`."""
        files.replace(self.root / "LATEST", f"{name}\n".encode("ascii"))

    def done(self) -> dict[str, Any] | None:
        """The document in DONE; None while the run has not ended."""
        try:
            document = json.loads((self.root / "DONE").read_bytes())
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) else None

    def write_done(self, document: dict[str, Any]) -> None:
        """Say that the run has ended, atomically. Raises `OSError`."""
        files.make_folder(self.root, durable=True)
        files.replace(self.root / "DONE", json.dumps(document, indent=2).encode() + b"\n")

    def remove_done(self) -> None:
        """Take back that the run has ended. Raises `OSError`."""
        if (self.root / "DONE").exists():
            files.remove(self.root / "DONE")

    def _listed(self, pattern: re.Pattern[str]) -> list[Checkpoint]:
        try:
            entries = list(self.root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
        matches = [(pattern.fullmatch(folder.name), folder) for folder in folders]
        found = [Checkpoint(int(match[1]), int(match[2]), folder) for match, folder in matches if match]
        return sorted(found, key=lambda one: one.order, reverse=True)
