"""Checks of this machine for `kdist run`. torch is not imported, because that takes seconds."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from kdist.doctor.finding import Finding, missing, note, ok
from kdist.job.local import install_command
from kdist.units import size
from kdist_trainer.formats.requirements import OF_IMAGE, OLDEST_PYTHON, is_older

LOW_DISK = 2 * 2**30
LOW_SHM = 256 * 2**20


def check() -> Iterator[Finding]:
    """All checks of this machine."""
    yield check_python(sys.version_info[:2])
    yield check_torch(_torch_version())
    yield check_disk(Path.cwd())
    if Path("/dev/shm").is_dir():  # noqa: S108 - the machine's shared memory itself
        yield check_shared_memory(Path("/dev/shm"))  # noqa: S108
    every = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    kind = f"{platform.system()} {platform.machine()}"
    yield ok("processors", f"{usable} of {every} usable; {kind}")


def check_python(version: tuple[int, ...]) -> Finding:
    """The Python that runs kdist and the trainings of `kdist run`."""
    detail = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version < OLDEST_PYTHON:
        return missing(
            "python", detail, f"install Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer"
        )
    return ok("python", detail)


def check_torch(version: str | None) -> Finding:
    """The installed version of torch; None if there is none."""
    if version is None:
        return note(
            "torch",
            "not installed; `kdist run` needs it, jobs on a cluster do not",
            install_command(),
        )
    if is_older(version, OF_IMAGE["torch"]):
        return missing("torch", version, f"kdist needs a newer one: install {OF_IMAGE['torch']}")
    return ok("torch", version)


def check_disk(folder: Path) -> Finding:
    """Free disk space for the runs and checkpoints of `kdist run`."""
    free = shutil.disk_usage(folder).free
    detail = f"{size(free)} free in {folder}"
    fix = "checkpoints may fill it; KDIST_HOME selects another folder for runs"
    return note("disk", detail, fix) if free < LOW_DISK else ok("disk", detail)


def check_shared_memory(folder: Path) -> Finding:
    """Shared memory; with a container's default of 64 MB data loaders crash with a bus error."""
    total = shutil.disk_usage(folder).total
    detail = f"{size(total)} at {folder}"
    fix = "give the container more: --shm-size=1g"
    return note("shared memory", detail, fix) if total < LOW_SHM else ok("shared memory", detail)


def _torch_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None
