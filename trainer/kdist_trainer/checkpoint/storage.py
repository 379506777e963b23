"""Whether all ranks see one folder: found out by a token, not believed."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from kdist_trainer.checkpoint import files
from kdist_trainer.checkpoint.peers import Peers
from kdist_trainer.failure import StorageProblem


def probe(root: Path, peers: Peers) -> list[bool]:
    """For each rank, whether its `root` is the folder that rank 0 writes to. Collective; makes the folder on rank 0.

    The token's name is new each time: no cache of a network file system can have an old answer for it. Raises
    `StorageProblem` on every rank when rank 0 cannot write.
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
        files.write_new(root / name, token.encode(), exclusive=True)
    except OSError as error:
        raise StorageProblem(f"cannot write to the checkpoint folder {root}: {error}") from error
    return name, token


def _read_token(path: Path, token: str) -> bool:
    try:
        return path.read_text("ascii") == token
    except (OSError, UnicodeDecodeError):
        return False
