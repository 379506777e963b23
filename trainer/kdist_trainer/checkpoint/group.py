"""The process group of checkpoints: it exchanges small objects, broadcasts state and probes the
storage.

Saves run in a background thread, so their messages use a gloo group of their own, with a long
timeout because a rank may wait for another rank's disk. In a broadcast one rank reads whole tensors
and sends them in flat buckets through CPU memory, and each rank keeps its shard; no rank holds the
state twice. The probes find out whether all ranks see the same folder and whether its file system
supports what checkpoints need.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from kdist_trainer import group_abort
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.layout import name_of
from kdist_trainer.errors import CheckpointMismatchError, StorageError

T = TypeVar("T")
_TIMEOUT = timedelta(hours=6)


class RankInfo(Protocol):
    """The part of `World` that checkpoints need; ranks count from 0."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def generation(self) -> int: ...


class CheckpointGroup:
    """All ranks of one world. Every method is collective: all ranks call the same ones in the same
    order.
    """

    def __init__(self, world: RankInfo) -> None:
        self.rank = world.rank
        self.size = world.size
        self.process_group: dist.ProcessGroup | None = None
        if self.size > 1:
            with group_abort.recording():
                group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
            self.process_group = group if isinstance(group, dist.ProcessGroup) else None

    @property
    def is_rank_zero(self) -> bool:
        """Rank 0, which commits."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """The `value` of rank `source`, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.process_group)
        return box[0]

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 only; every rank returns its result or raises its error."""
        result: T | None = None
        error: Exception | None = None
        if self.is_rank_zero:
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001 - every error is sent to all ranks
                error = raised
        result, error = self.broadcast((result, error))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # no error, so it is the result

    def on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """Call `work` on every rank; every rank returns all results, by rank, or raises the error
        of the lowest rank that failed.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - every error is sent to all ranks
            error = raised
        outcomes = self.gather((result, error))
        for _, problem in outcomes:
            if problem is not None:
                raise problem
        return [value for value, _ in outcomes]  # type: ignore[misc]  # no error, so all are results


BUCKET_BYTES = 64 << 20

Fetch = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Reads tensors by their names, whole and on the CPU; called on the source rank only."""


class _Layout(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def broadcast_state(state: dict[str, Any], group: CheckpointGroup, *, source: int) -> None:
    """Copy the state of rank `source` to all ranks, tensors in place. Collective.

    Args:
        state: values by flat name; all ranks have the same names, shapes and dtypes, and whole
            tensors.
        group: the ranks.
        source: the rank whose state is copied.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    state.update(group.broadcast(others, source=source))
    send(
        tensors,
        lambda names: {name: tensors[name].detach().cpu() for name in names},
        group,
        source=source,
    )


def send(
    tensors: Mapping[str, Tensor],
    fetch: Fetch,
    group: CheckpointGroup,
    *,
    source: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Fill the tensors of every rank in place with those that rank `source` reads. Collective.

    Args:
        tensors: this rank's, by name; ranks may have different names, and parts of tensors.
        fetch: reads whole tensors on `source`. Every rank raises what it raises, and some tensors
            are filled then.
        group: the ranks.
        source: the rank that reads.
        bucket_bytes: about how much is read and sent at a time.
    """
    layouts: dict[str, _Layout] = {}
    for each in group.gather(
        {name: _Layout(value.shape, value.dtype) for name, value in tensors.items()}
    ):
        layouts |= each
    for names in buckets(layouts, bucket_bytes):
        flat, error = None, None
        if group.rank == source:
            try:
                flat = _flatten(fetch(names), names, layouts)
            except Exception as raised:  # noqa: BLE001 - every error is sent to all ranks
                error = raised
        error = group.broadcast(error, source=source)
        if error is not None:
            raise error
        if flat is None:
            flat = torch.empty(
                sum(layouts[name].shape.numel() for name in names), dtype=layouts[names[0]].dtype
            )
        if group.size > 1:
            dist.broadcast(flat, src=source, group=group.process_group)
        _fill_from(tensors, names, layouts, flat)


def buckets(layouts: Mapping[str, _Layout], max_bytes: int) -> Iterator[list[str]]:
    """Divide tensors into buckets of one dtype and about `max_bytes`, the same on every rank.

    Args:
        layouts: shape and dtype by name.
        max_bytes: size from which on a bucket takes no further tensor.

    Yields:
        The names in a bucket.
    """
    bucket: list[str] = []
    size = 0
    for name in sorted(layouts, key=lambda one: (str(layouts[one].dtype), one)):
        other_type = bool(bucket) and layouts[name].dtype != layouts[bucket[0]].dtype
        if bucket and (other_type or size + layouts[name].nbytes > max_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += layouts[name].nbytes
    if bucket:
        yield bucket


def fill(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor on the CPU into this rank's part of it, on any device."""
    with torch.no_grad():
        held = target.detach()
        if isinstance(held, DTensor):
            # Without a source rank each rank slices the whole tensor and nothing is sent.
            part = distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
            held.to_local().copy_(part.to_local())
        else:
            held.copy_(whole)


def _flatten(
    found: Mapping[str, Tensor], names: Sequence[str], layouts: Mapping[str, _Layout]
) -> Tensor:
    if len(names) == 1:
        return found[names[0]].reshape(-1).to(layouts[names[0]].dtype).contiguous()
    return torch.cat([found[name].reshape(-1).to(layouts[name].dtype) for name in names])


def _fill_from(
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    layouts: Mapping[str, _Layout],
    flat: Tensor,
) -> None:
    start = 0
    for name in names:
        count = layouts[name].shape.numel()
        if name in tensors:
            fill(tensors[name], flat[start : start + count].view(layouts[name].shape))
        start += count


def probe(root: Path, group: CheckpointGroup) -> list[bool]:
    """Find out which ranks see the folder that rank 0 writes to. Collective.

    The file that is looked for has a new name each time, so no cache of a network file system can
    have an answer for it.

    Args:
        root: the folder, which rank 0 creates.
        group: the ranks.

    Returns:
        By rank, whether its `root` is rank 0's.

    Raises:
        StorageError: rank 0 cannot write; raised on every rank.
        CheckpointMismatchError: the file system lacks something that checkpoints need; raised on
            every rank.
    """
    path, token = group.on_rank_zero(lambda: _write_token(root))
    try:
        return group.on_all_ranks(lambda: _read_token(root / path, token))
    finally:
        if group.is_rank_zero:
            with suppress(OSError):
                storage.remove(root / path)


def _write_token(root: Path) -> tuple[str, str]:
    name, token = f"probe-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        storage.make_folder(root, durable=True)
        check_file_system(root)
        storage.write_new(root / name, token.encode(), exclusive=True)
    except OSError as error:
        raise StorageError(f"cannot write to the checkpoint folder {root}: {error}") from error
    return name, token


def _read_token(path: Path, token: str) -> bool:
    try:
        return path.read_text("ascii") == token
    except (OSError, UnicodeDecodeError):
        return False


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
