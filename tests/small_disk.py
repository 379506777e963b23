"""A disk that is soon full: a tmpfs of a few MiB; and one that stops answering: a frozen ext4."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def small_disk(folder: Path, *, mib: int) -> Iterator[Path]:
    """What a fixture of a test yields from: the disk, where this machine lets us mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "kdist-test", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take what space is left, or is left again; the file that took it."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return ballast


class HangingDisk:
    """A file system that keeps whoever writes to it while it is frozen, as one does whose server is
    gone; reads are answered.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_frozen = False

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", str(self.folder)], check=True)
        self._is_frozen = True

    def thaw(self) -> None:
        if self._is_frozen:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.folder)], check=True)
            self._is_frozen = False


def hanging_disk(folder: Path, *, mib: int = 64) -> Iterator[HangingDisk]:
    """What a fixture of a test yields from: the disk, where this machine lets us mount one."""
    folder.mkdir()
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(mib << 20)
    for command in (
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop,noatime", str(image), str(folder)],
    ):
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            pytest.skip("mounting a file system needs root, a loop device and mkfs.ext4")
    disk = HangingDisk(folder)
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", "-l", str(folder)], check=True)
