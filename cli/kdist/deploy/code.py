"""The folder of `spec.code`, read into memory to travel in a ConfigMap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kdist.errors import KdistError, UsageError
from kdist.spec import TrainingJob

# A ConfigMap holds 1 MiB; whoever names a folder far beyond that should hear of it before all of it has been read.
MOST_BYTES = 64 * 1024 * 1024
_LEFT_OUT = frozenset({"__pycache__", "node_modules"})


def read_code(job: TrainingJob, base: Path) -> dict[str, bytes] | None:
    """Files of the job's code folder by their path with `/`; None if it has none. `base` is where its path starts.

    Hidden files, byte code and links that lead out of the folder stay behind. Raises `UsageError` if there is no such folder,
    `KdistError` if it is far too big.
    """
    if job.spec.code is None:
        return None
    folder = (base / Path(job.spec.code).expanduser()).resolve()
    if not folder.is_dir():
        raise UsageError(f"spec.code: there is no folder {folder}", hint="its path is relative to the job file")
    found: dict[str, bytes] = {}
    total = 0
    for path in _files(folder):
        total += path.stat().st_size
        if total > MOST_BYTES:
            raise KdistError(
                f"spec.code: {folder} holds more than {MOST_BYTES // 2**20} MiB",
                hint="put data and weights on a claim (spec.data), large code into the image",
            )
        found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or part in _LEFT_OUT for part in parts):
            continue
        if path.is_file() and path.resolve().is_relative_to(folder):
            yield path
