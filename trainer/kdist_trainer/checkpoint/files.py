"""Checkpoints whose files a framework writes and reads in its own format: `FileCheckpointManager`.

The framework writes into the temporary folder of a save. In the background all ranks sync and
digest the files, and rank 0 commits them as any other checkpoint: with a manifest, by a rename,
under the folder's lock. What the framework is given to read has been verified before.

A framework knows files only. With checkpoints in an object store it writes to and reads from a
folder of this node, from which the ranks upload the files, and to which one rank downloads them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.commit import CommitRequest, SaveResult
from kdist_trainer.checkpoint.manifest import FILES, Manifest, write_state
from kdist_trainer.digest import Digest
from kdist_trainer.errors import StorageError, classify
from kdist_trainer.object_store.store import ObjectPath

WriteFiles = Callable[[Path], None]
"""Writes this rank's files into a folder that all ranks share. Called on every rank."""


class FileCheckpointManager(CheckpointManager):
    """Commits and verifies what a framework writes. Collective, as `CheckpointManager` is."""

    must_be_shared = (
        "which the checkpoints of a framework need: use a volume that all nodes mount "
        "(ReadWriteMany), or kdist's Checkpointer in a loop of your own"
    )

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
        state = {"step": step, "framework": framework}
        manifest = self._describe(step, state)
        temporary = self._new_folder(manifest.name)
        local = temporary if isinstance(temporary, Path) else _local_folder() / temporary.name
        error = self._write(write, local)
        request = CommitRequest(
            manifest=manifest,
            state=write_state(state, self._identity.job),
            temporary=temporary,
            started=started,
            visible_seconds=time.monotonic() - started,
        )

        def commit() -> SaveResult:
            if isinstance(temporary, Path):
                return self._writer.commit(request, partial(self._digest, temporary, error))
            try:
                return self._writer.commit(request, partial(self._upload, local, temporary, error))
            finally:
                shutil.rmtree(local, ignore_errors=True)

        self._writer.begin()
        self._background.start(commit)

    def _write(self, write: WriteFiles, temporary: Path) -> Exception | None:
        """Call `write` on every rank; returns the error of a disk, the same on every rank."""
        problem: Exception | None = None
        try:
            self._group.on_all_ranks(partial(_make_folders, temporary))
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

    def _upload(
        self, local: Path, target: ObjectPath, error: Exception | None
    ) -> dict[str, Digest]:
        """Upload what this rank is the first to see of the files; returns the digests of all."""
        if error is not None:
            raise error
        seen = self._group.on_all_ranks(partial(_find_files, local))
        owners = {name: rank for rank in reversed(range(len(seen))) for name in seen[rank]}
        if not owners:
            raise StorageError("the framework wrote no file")

        def upload() -> dict[str, Digest]:
            return {
                name: _upload_file(local / name, target / name)
                for name, rank in owners.items()
                if rank == self._group.rank
            }

        shares = self._group.on_all_ranks(upload)
        return {name: digest for share in shares for name, digest in share.items()}


def _local_folder() -> Path:
    """A folder of this node that its ranks share."""
    return Path(os.environ.get("KDIST_SCRATCH") or tempfile.gettempdir())


def _make_folders(temporary: Path) -> None:
    storage.make_folder(temporary)
    storage.make_folder(temporary / FILES)


def _list_files(temporary: Path) -> list[str]:
    """Names of the files relative to the folder. Raises `StorageError` if there is none, or a
    link.
    """
    names = _find_files(temporary)
    if not names:
        raise StorageError("the framework wrote no file")
    return names


def _find_files(folder: Path) -> list[str]:
    """Names of the files relative to the folder. Raises `StorageError` if one is a link."""
    paths = sorted(path for path in (folder / FILES).rglob("*") if not path.is_dir())
    strange = next((path for path in paths if path.is_symlink() or not path.is_file()), None)
    if strange is not None:
        raise StorageError(f"{strange} is not a regular file")
    return [path.relative_to(folder).as_posix() for path in paths]


def _upload_file(path: Path, target: ObjectPath) -> Digest:
    """Upload a file. Returns its digest. Raises `OSError`."""
    stream = storage.create(target)
    with stream, path.open("rb") as file:
        shutil.copyfileobj(file, stream, storage.BUFFER_BYTES)
    return stream.digest
