"""Folders that not all ranks see: finding out, and passing a state from the rank that has it to the others."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kdist_trainer.checkpoint import files
from kdist_trainer.checkpoint.peers import Peers
from kdist_trainer.failure import StorageProblem

_BUCKET_BYTES = 64 << 20


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


def broadcast_state(state: dict[str, Any], peers: Peers, *, source: int) -> None:
    """Make the flat `state` of every rank equal to that of rank `source`, tensors in place. Collective.

    All ranks must have the same names, shapes and dtypes. Tensors travel in buckets through CPU memory, whatever their device.
    """
    tensors = {name: value for name, value in sorted(state.items()) if isinstance(value, Tensor)}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    state.update(peers.broadcast(others, source=source))
    with torch.no_grad():
        for bucket in _buckets(tensors):
            if peers.rank == source:
                flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in bucket])
            else:
                flat = torch.empty(sum(tensor.numel() for tensor in bucket), dtype=bucket[0].dtype)
            dist.broadcast(flat, src=source, group=peers.group)
            start = 0
            for tensor in bucket:
                tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()


def _buckets(tensors: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype together, about `_BUCKET_BYTES` at a time, in an order that is the same on every rank."""
    bucket: list[Tensor] = []
    for tensor in sorted(tensors.values(), key=lambda one: str(one.dtype)):
        full = sum(one.nbytes for one in bucket) + tensor.nbytes > _BUCKET_BYTES
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
