"""Whether all ranks see one folder, and whether it can do what checkpoints need: found out, not believed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from kdist_trainer.checkpoint import files
from kdist_trainer.checkpoint.layout import name_of
from kdist_trainer.checkpoint.peers import Peers
from kdist_trainer.failure import Mismatch, StorageProblem


def probe(root: Path, peers: Peers) -> list[bool]:
    """For each rank, whether its `root` is the folder that rank 0 writes to. Collective; makes the folder on rank 0.

    The token's name is new each time: no cache of a network file system can have an old answer for it. Raises on every rank
    `StorageProblem` when rank 0 cannot write, `Mismatch` when the folder's file system lacks something that checkpoints need.
    """
    path, token = peers.on_leader(lambda: _write_token(root))
    try:
        return peers.everywhere(lambda: _read_token(root / path, token))
    finally:
        if peers.is_leader:
            with suppress(OSError):
                files.remove(root / path)


def _write_token(root: Path) -> tuple[str, str]:
    name, token = f"probe-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        files.make_folder(root, durable=True)
        check_abilities(root)
        files.write_new(root / name, token.encode(), exclusive=True)
    except OSError as error:
        raise StorageProblem(f"cannot write to the checkpoint folder {root}: {error}") from error
    return name, token


def _read_token(path: Path, token: str) -> bool:
    try:
        return path.read_text("ascii") == token
    except (OSError, UnicodeDecodeError):
        return False


def check_abilities(root: Path) -> None:
    """Do once, with a folder of a moment, what every save and the ledger will do.

    Raises `Mismatch` for what the file system cannot do, `OSError` for a disk that is full or broken: that may pass.
    """
    litter = name_of(0, 0) + ".tmp-probe-" + secrets.token_hex(4)  # swept like a save's, should this process die here
    before, after = root / litter, root / f"{litter}-renamed"
    try:
        for ability, attempt in _ABILITIES.items():
            try:
                works = attempt(before, after)
            except OSError as error:
                if error.errno not in _LACKING:
                    raise
                works, why = False, f" ({error.strerror})"
            else:
                why = ""
            if not works:
                raise Mismatch(
                    f"the file system of the checkpoint folder {root} cannot {ability}{why}, which checkpoints need: use a "
                    "volume with a POSIX file system (a disk, NFS, CephFS, Lustre), not an object store behind FUSE"
                )
    finally:
        for folder in (before, after):
            with suppress(OSError):
                files.remove_tree(folder)


_LACKING = (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTEMPTY, errno.EISDIR)
"""What a file system answers that will answer the same next time."""


def _writes_and_syncs(before: Path, _: Path) -> bool:
    files.make_folder(before)
    files.write_new(before / "file", b"probe")
    files.sync_folder(before)
    return (before / "file").read_bytes() == b"probe"


def _creates_once(before: Path, _: Path) -> bool:
    files.write_new(before / "claim", b"", exclusive=True)
    try:
        files.write_new(before / "claim", b"", exclusive=True)
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
    files.replace(before / "file", b"other")
    return (before / "file").read_bytes() == b"other"


def _renames(before: Path, after: Path) -> bool:
    files.rename(before, after)
    return not before.exists() and (after / "file").read_bytes() == b"other"


_ABILITIES: Final[Mapping[str, Callable[[Path, Path], bool]]] = {
    "write and fsync files and folders": _writes_and_syncs,
    "create a file only where there is none": _creates_once,
    "append to a file": _appends,
    "replace a file by another": _replaces,
    "rename a folder": _renames,
}
