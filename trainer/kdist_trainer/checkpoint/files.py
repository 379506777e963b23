"""Checkpoints whose files a framework writes and reads in its own format: `FileCheckpointManager`.

The framework writes into the temporary folder of a save. In the background all ranks sync and
digest the files, and rank 0 commits them as any other checkpoint: with a manifest, by a rename,
under the folder's lock. What the framework is given to read has been verified before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.commit import CommitRequest, SaveResult
from kdist_trainer.checkpoint.digest import Digest
from kdist_trainer.checkpoint.layout import FILES, Checkpoint
from kdist_trainer.errors import PeersLostError, StorageError, classify

WriteFiles = Callable[[Path], None]
"""Writes this rank's files into a folder that all ranks share. Called on every rank."""


class FileCheckpointManager(CheckpointManager):
    """Commits and verifies what a framework writes. Collective, as `CheckpointManager` is."""

    def find(self, framework: str) -> tuple[int, Path] | None:
        """Find the newest checkpoint that verifies; what is saved from now on follows it.

        Args:
            framework: the framework that must have written it.

        Returns:
            Its step, and the folder of the framework's files; None if there is none.

        Raises:
            CheckpointMismatchError: it is another framework's, or none can be read.
        """
        found = self._restore.find(framework)
        if found is not None:
            manifest = found.manifest
            folder = self.directory.root / manifest.name
            self.resumed = Checkpoint(manifest.step, manifest.epoch, folder)
        self._opener.set_base(self.resumed)
        return (self.resumed.step, self.resumed.path / FILES) if self.resumed else None

    def save_files(
        self, write: WriteFiles, *, framework: str, step: int, required: bool = False
    ) -> None:
        """Have a framework write a checkpoint as of `step`, and commit it in the background.

        Args:
            write: called on the thread of the caller, because it may use the framework's own
                process groups and devices.
            framework: the framework.
            step: the number of completed steps.
            required: wait for the commit, and try twice.

        Raises:
            StorageError: a required save failed twice. Otherwise a failure goes to `on_result`.
            PeersLostError: a required save failed because other ranks are gone.
            LockLostError: another group has locked the folder.
        """
        started = time.monotonic()
        self.wait()
        for _ in range(2 if required else 1):
            acknowledged = self._writer.acknowledged
            if acknowledged is not None and acknowledged.step == step:
                return
            self._commit_files(write, framework=framework, step=step, started=started)
            if not required:
                if self._blocking:
                    self.wait()
                return
            result = self._collect()
            if result.ok:
                return
            if result.secondary:
                break
        problem = PeersLostError if result.secondary else StorageError
        raise problem(f"the state of step {result.step} could not be saved: {result.error}")

    def _commit_files(
        self, write: WriteFiles, *, framework: str, step: int, started: float
    ) -> None:
        state = {"step": step, "framework": framework}
        manifest = self._describe(step, state)
        self._saves += 1
        temporary = self.directory.root / f"{manifest.name}.tmp-{self._folder.name}-{self._saves}"
        error = self._write(write, temporary)
        request = CommitRequest(
            manifest=manifest,
            state=json.dumps({"state": state, "job": self._job}, indent=1).encode() + b"\n",
            temporary=temporary,
            started=started,
            visible_seconds=time.monotonic() - started,
        )

        def commit() -> SaveResult:
            return self._writer.commit(request, partial(self._digest, temporary, error))

        self._background.start(commit)

    def _write(self, write: WriteFiles, temporary: Path) -> Exception | None:
        """Call `write` on every rank; returns the error of a disk, the same on every rank."""
        problem: Exception | None = None
        try:
            self._group.on_rank_zero(partial(_make_folders, temporary))
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

    def _digest(self, temporary: Path, error: Exception | None) -> dict[str, Digest]:
        """Sync and digest this rank's share of the files; returns the digests of all."""
        if error is not None:
            raise error
        names = self._group.on_rank_zero(partial(_list_files, temporary))

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

    def must_be_shared(self, *, sharded: bool) -> str | None:  # noqa: ARG002 - all formats need it
        """Why all ranks must share the folder, and what to do otherwise."""
        return (
            "which the checkpoints of a framework need: use a volume that all nodes mount "
            "(ReadWriteMany), or kdist's Checkpointer in a loop of your own"
        )


def _make_folders(temporary: Path) -> None:
    storage.make_folder(temporary)
    storage.make_folder(temporary / FILES)


def _list_files(temporary: Path) -> list[str]:
    """Names of the files relative to the folder. Raises `StorageError` if there is none, or a
    link.
    """
    paths = sorted(path for path in (temporary / FILES).rglob("*") if not path.is_dir())
    strange = next((path for path in paths if path.is_symlink() or not path.is_file()), None)
    if strange is not None or not paths:
        what = f"{strange} is not a regular file" if strange else "the framework wrote no file"
        raise StorageError(what)
    return [path.relative_to(temporary).as_posix() for path in paths]
