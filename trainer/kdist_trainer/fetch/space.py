"""Whether what is to be fetched fits: into what the job allows, and on the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kdist_trainer.errors import DataError
from kdist_trainer.fetch.folder import FetchFolder
from kdist_trainer.fetch.request import FetchRequest
from kdist_trainer.fetch.source import RemoteFile

_UNITS = ("Ki", "Mi", "Gi", "Ti")


def check_space(request: FetchRequest, folder: FetchFolder, files: Sequence[RemoteFile]) -> None:
    """Raise `DataError` if the files are larger than the job allows, or than the disk's space.

    Args:
        request: what is fetched.
        folder: where to.
        files: all of them; those of unknown size count as empty here.
    """
    total = sum(file.size or 0 for file in files)
    if request.max_bytes is not None and total > request.max_bytes:
        raise too_large_error(request, total)
    missing = sum(
        max(0, (file.size or 0) - folder.partial_bytes(file))
        for file in files
        if not folder.is_complete(file)
    )
    free = free_bytes(request)
    if missing > free:
        raise DataError(
            f"{request.field}: {format_bytes(missing)} of {request.url} are to be fetched, but "
            f"{request.folder} has {format_bytes(free)} free: make room there, or raise "
            f"{request.field}.size so that the pods are placed on nodes with more space"
        )


def too_large_error(
    request: FetchRequest, total: int | None = None, *, at_least: int = 0
) -> DataError:
    """The error of files that are larger than the job allows."""
    amount = format_bytes(total) if total is not None else f"at least {format_bytes(at_least)}"
    return DataError(
        f"{request.field}: {request.url} has {amount}, more than the "
        f"{format_bytes(request.max_bytes or 0)} of {request.field}.size: raise "
        f"{request.field}.size"
    )


def full_error(request: FetchRequest, file: RemoteFile, partial: Path) -> DataError:
    """The error of a disk that has become full while a file was written to `partial`."""
    done = partial.stat().st_size
    missing = f"{format_bytes(file.size - done)} of" if file.size is not None else "the rest of"
    return DataError(
        f"{request.field}: no space is left for {missing} {file.name}: {request.folder} has "
        f"{format_bytes(free_bytes(request))} free: make room there, or raise "
        f"{request.field}.size so that the pods are placed on nodes with more space"
    )


def free_bytes(request: FetchRequest) -> int:
    """The free space of the disk, in bytes."""
    found = os.statvfs(request.folder)
    return found.f_bavail * found.f_frsize


def format_bytes(number: int) -> str:
    """A number of bytes for people, exact and rounded."""
    amount, unit = float(number), ""
    for larger in _UNITS:
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{number} bytes" if not unit else f"{number} bytes ({amount:.1f} {unit}B)"
