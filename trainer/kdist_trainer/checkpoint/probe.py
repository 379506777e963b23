"""Finds out whether all ranks see the same checkpoint folder, and whether its file system supports
what checkpoints need.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.manifest import name_of
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.object_store.errors import ObjectChangedError
from kdist_trainer.object_store.store import ObjectPath


class Token(NamedTuple):
    """A file that rank 0 has written, for the others to look for. Its name is new each time, so no
    cache of a network file system can have an answer for it.
    """

    name: str
    text: str


def write_token(root: StoragePath, *, is_new: bool = False) -> Token:
    """Write a token.

    Args:
        root: the folder, which is created.
        is_new: whether to find out first whether the file system has what checkpoints need, which
            takes a dozen syncs of the disk.

    Raises:
        OSError: the folder cannot be written.
        CheckpointMismatchError: the file system lacks something that checkpoints need.
    """
    token = Token(f"probe-{secrets.token_hex(8)}", secrets.token_hex(16))
    storage.make_folder(root, durable=True)
    if is_new and isinstance(root, Path):
        check_file_system(root)
    elif is_new and isinstance(root, ObjectPath):
        check_conditions(root / token.name)
    try:
        storage.write_new(root / token.name, token.text.encode(), exclusive=True)
    except OSError:
        remove_token(root, token)  # without content
        raise
    return token


def read_token(root: StoragePath, token: Token) -> bool:
    """Whether `root` is the folder that the token was written to."""
    try:
        return (root / token.name).read_text("ascii") == token.text
    except (OSError, UnicodeDecodeError):
        return False


def remove_token(root: StoragePath, token: Token) -> None:
    """Remove it. Never raises `OSError`: it is removed later otherwise."""
    with suppress(OSError):
        storage.remove(root / token.name)


def check_conditions(path: ObjectPath) -> None:
    """Find out whether an object store honors the conditions that the lock and commits need.

    Args:
        path: an object that does not exist, and does not afterwards.

    Raises:
        CheckpointMismatchError: it replaces what must not be replaced.
        OSError: it failed.
    """
    store, key = path.store, path.key
    stale = store.put_new(key, b"first")
    try:
        ignored = None
        with suppress(FileExistsError):
            store.put_new(key, b"second")
            ignored = "If-None-Match"
        if ignored is None:
            store.replace(key, b"third", stale)
            with suppress(ObjectChangedError):
                store.replace(key, b"fourth", stale)
                ignored = "If-Match"
    finally:
        store.delete(key)
    if ignored is not None:
        raise CheckpointMismatchError(
            f"the object store of {path.parent} ignores {ignored}, which checkpoints need: use one "
            "that honors it (S3 since November 2024, MinIO, Ceph, GCS, Azure), or a volume"
        )


def check_file_system(root: Path) -> None:
    """Try every operation of a save and of the ledger once, in a temporary folder.

    Raises:
        CheckpointMismatchError: the file system does not support an operation.
        OSError: the disk is full or broken, which may be temporary.
    """
    # named like a save's folder: it is cleaned up later if this process dies here
    stale = name_of(0, 0) + ".tmp-probe-" + secrets.token_hex(4)
    before, after = root / stale, root / f"{stale}-renamed"
    try:
        for operation, attempt in _OPERATIONS.items():
            try:
                works = attempt(before, after)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                works, why = False, f" ({error.strerror})"
            else:
                why = ""
            if not works:
                raise CheckpointMismatchError(
                    f"the file system of the checkpoint folder {root} cannot "
                    f"{operation}{why}, which checkpoints need: use a "
                    "volume with a POSIX file system (a disk, NFS, CephFS, Lustre), not "
                    "an object store behind FUSE"
                )
    finally:
        for folder in (before, after):
            with suppress(OSError):
                storage.remove_tree(folder)


_UNSUPPORTED = (
    errno.EPERM,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.ENOTEMPTY,
    errno.EISDIR,
)
"""Errors that a file system would report again."""


def _writes_and_syncs(before: Path, _: Path) -> bool:
    storage.make_folder(before)
    storage.write_new(before / "file", b"probe")
    storage.sync_folder(before)
    return (before / "file").read_bytes() == b"probe"


def _creates_once(before: Path, _: Path) -> bool:
    storage.write_new(before / "claim", b"", exclusive=True)
    try:
        storage.write_new(before / "claim", b"", exclusive=True)
    except FileExistsError:
        return True
    return False


def _appends(before: Path, _: Path) -> bool:
    for line in (b"one\n", b"two\n"):
        with (before / "lines").open("ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())
    return (before / "lines").read_bytes() == b"one\ntwo\n"


def _replaces(before: Path, _: Path) -> bool:
    storage.replace(before / "file", b"other")
    return (before / "file").read_bytes() == b"other"


def _renames(before: Path, after: Path) -> bool:
    storage.rename(before, after)
    return not before.exists() and (after / "file").read_bytes() == b"other"


_OPERATIONS: Final[Mapping[str, Callable[[Path, Path], bool]]] = {
    "write and fsync files and folders": _writes_and_syncs,
    "create a file only where there is none": _creates_once,
    "append to a file": _appends,
    "replace a file by another": _replaces,
    "rename a folder": _renames,
}
