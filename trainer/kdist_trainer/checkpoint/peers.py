"""The process group of checkpoints: exchanges small objects, broadcasts state, and probes the
storage.

Saves run in a background thread, so their messages use a gloo group of their own, with a long
timeout because a rank may wait for another rank's disk. In a broadcast one rank reads whole tensors
and sends them in flat buckets through CPU memory, and each rank keeps its shard; the state is never
held twice. The probes find out whether all ranks see the same folder and whether its file system
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

from kdist_trainer.checkpoint import durable_files
from kdist_trainer.checkpoint.layout import name_of
from kdist_trainer.errors import CheckpointMismatchError, StorageError

T = TypeVar("T")
_PATIENCE = timedelta(hours=6)


class RankInfo(Protocol):
    """What is needed to know of the world; ranks count from 0."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def generation(self) -> int: ...


class CheckpointGroup:
    """The ranks of one world. Every method is collective: all ranks call the same ones in the same
    order.
    """

    def __init__(self, world: RankInfo) -> None:
        self.rank = world.rank
        self.size = world.size
        self.group: dist.ProcessGroup | None = None
        if self.size > 1:
            group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self.group = group if isinstance(group, dist.ProcessGroup) else None

    @property
    def is_leader(self) -> bool:
        """Rank 0, which commits."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """What `value` is on rank `source`."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.group)
        return box[0]

    def on_leader(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0; every rank gets its result, or raises what it raised."""
        result: T | None = None
        error: Exception | None = None
        if self.is_leader:
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001 - whatever it is, all ranks must learn of it
                error = raised
        result, error = self.broadcast((result, error))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # no error, so it is the result

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank; every rank gets all results, or raises the lowest failing rank's
        error.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - whatever it is, all ranks must learn of it
            error = raised
        outcomes = self.gather((result, error))
        for _, problem in outcomes:
            if problem is not None:
                raise problem
        return [value for value, _ in outcomes]  # type: ignore[misc]  # no error, so all are results


BUCKET_BYTES = 64 << 20

Fetch = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Names of tensors -> the whole tensors, on the CPU. Asked on the reading rank only."""


class _Layout(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def broadcast_state(state: dict[str, Any], peers: CheckpointGroup, *, source: int) -> None:
    """Make the flat `state` of every rank equal to that of rank `source`, tensors in place.
    Collective.

    All ranks must have the same names, shapes and dtypes, and whole tensors.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    state.update(peers.broadcast(others, source=source))
    send(
        tensors,
        lambda names: {name: tensors[name].detach().cpu() for name in names},
        peers,
        source=source,
    )


def send(
    tensors: Mapping[str, Tensor],
    fetch: Fetch,
    peers: CheckpointGroup,
    *,
    source: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Fill the tensors of every rank, in place, with what `fetch` gives on rank `source`.
    Collective.

    A rank may hold other names than the others, or parts of tensors only. Raises on every rank what
    `fetch` raised on its one; some tensors are filled then and some are not.
    """
    layouts: dict[str, _Layout] = {}
    for each in peers.gather(
        {name: _Layout(value.shape, value.dtype) for name, value in tensors.items()}
    ):
        layouts |= each
    for names in buckets(layouts, bucket_bytes):
        flat, error = None, None
        if peers.rank == source:
            try:
                flat = _flatten(fetch(names), names, layouts)
            except Exception as raised:  # noqa: BLE001 - whatever it is, all ranks must learn of it
                error = raised
        error = peers.broadcast(error, source=source)
        if error is not None:
            raise error
        if flat is None:
            flat = torch.empty(
                sum(layouts[name].shape.numel() for name in names), dtype=layouts[names[0]].dtype
            )
        if peers.size > 1:
            dist.broadcast(flat, src=source, group=peers.group)
        _take(tensors, names, layouts, flat)


def buckets(layouts: Mapping[str, _Layout], most_bytes: int) -> Iterator[list[str]]:
    """Names of tensors of one dtype, together about `most_bytes`, in an order that is the same on
    every rank.
    """
    bucket: list[str] = []
    size = 0
    for name in sorted(layouts, key=lambda one: (str(layouts[one].dtype), one)):
        other_type = bool(bucket) and layouts[name].dtype != layouts[bucket[0]].dtype
        if bucket and (other_type or size + layouts[name].nbytes > most_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += layouts[name].nbytes
    if bucket:
        yield bucket


def fill(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, on the CPU, into what this rank holds of it, wherever that is."""
    with torch.no_grad():
        held = target.detach()
        if isinstance(held, DTensor):
            # Without a source rank every rank cuts its own part out, and nothing is sent.
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


def _take(
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


def probe(root: Path, peers: CheckpointGroup) -> list[bool]:
    """For each rank, whether its `root` is the folder that rank 0 writes to. Collective; makes the
    folder on rank 0.

    The token's name is new each time: no cache of a network file system can have an old answer for
    it. Raises on every rank `StorageError` when rank 0 cannot write, `CheckpointMismatchError` when
    the folder's file system lacks something that checkpoints need.
    """
    path, token = peers.on_leader(lambda: _write_token(root))
    try:
        return peers.everywhere(lambda: _read_token(root / path, token))
    finally:
        if peers.is_leader:
            with suppress(OSError):
                durable_files.remove(root / path)


def _write_token(root: Path) -> tuple[str, str]:
    name, token = f"probe-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        durable_files.make_folder(root, durable=True)
        check_abilities(root)
        durable_files.write_new(root / name, token.encode(), exclusive=True)
    except OSError as error:
        raise StorageError(f"cannot write to the checkpoint folder {root}: {error}") from error
    return name, token


def _read_token(path: Path, token: str) -> bool:
    try:
        return path.read_text("ascii") == token
    except (OSError, UnicodeDecodeError):
        return False


def check_abilities(root: Path) -> None:
    """Do once, with a folder of a moment, what every save and the ledger will do.

    Raises `CheckpointMismatchError` for what the file system cannot do, `OSError` for a disk that
    is full or broken: that may pass.
    """
    # swept like a save's, should this process die here
    stale = name_of(0, 0) + ".tmp-probe-" + secrets.token_hex(4)
    before, after = root / stale, root / f"{stale}-renamed"
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
                raise CheckpointMismatchError(
                    f"the file system of the checkpoint folder {root} cannot "
                    f"{ability}{why}, which checkpoints need: use a "
                    "volume with a POSIX file system (a disk, NFS, CephFS, Lustre), not "
                    "an object store behind FUSE"
                )
    finally:
        for folder in (before, after):
            with suppress(OSError):
                durable_files.remove_tree(folder)


_LACKING = (
    errno.EPERM,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.ENOTEMPTY,
    errno.EISDIR,
)
"""What a file system answers that will answer the same next time."""


def _writes_and_syncs(before: Path, _: Path) -> bool:
    durable_files.make_folder(before)
    durable_files.write_new(before / "file", b"probe")
    durable_files.sync_folder(before)
    return (before / "file").read_bytes() == b"probe"


def _creates_once(before: Path, _: Path) -> bool:
    durable_files.write_new(before / "claim", b"", exclusive=True)
    try:
        durable_files.write_new(before / "claim", b"", exclusive=True)
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
    durable_files.replace(before / "file", b"other")
    return (before / "file").read_bytes() == b"other"


def _renames(before: Path, after: Path) -> bool:
    durable_files.rename(before, after)
    return not before.exists() and (after / "file").read_bytes() == b"other"


_ABILITIES: Final[Mapping[str, Callable[[Path, Path], bool]]] = {
    "write and fsync files and folders": _writes_and_syncs,
    "create a file only where there is none": _creates_once,
    "append to a file": _appends,
    "replace a file by another": _replaces,
    "rename a folder": _renames,
}
