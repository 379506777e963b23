"""The program that takes the files of a code folder onto a claim, in a helper pod, as
`python -c SOURCE FOLDER NAME DIGEST`: from the tar archive on its standard input it makes the
folder NAME in FOLDER, if DIGEST is that of its SHA256SUMS. `python -c SOURCE FOLDER/NAME DIGEST`
only says by its exit code whether that folder is there and undamaged.

Like the fault injector's, its own text is sent, so it imports the standard library alone.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import tarfile
import time
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath
from typing import IO

SUMS = "SHA256SUMS"
_UNFINISHED = ".unfinished-"
_KEPT_SECONDS = 86_400
_BLOCK = 1 << 20


def describe(name: str, digest: str) -> str:
    """A line as sha256sum writes it."""
    written = name
    for character, escape in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r")):
        written = written.replace(character, escape)
    mark = "" if written == name else "\\"
    return f"{mark}{digest}  {written}\n"


def receive(archive: tarfile.TarFile, folder: Path, name: str, digest: str) -> None:
    """Write all files of an archive, or none. Raises `ValueError` if they are not those that the
    digest stands for.
    """
    folder.mkdir(exist_ok=True)
    for left in folder.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):  # another upload has given it its name, or removed it
            if time.time() - left.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    new = _name_unfinished(folder)
    try:
        sums = "".join(_write(archive, each, new) for each in archive).encode()
        if sha256(sums).hexdigest() != digest:
            raise ValueError("the files have changed while they were sent: run the command again")
        _save(io.BytesIO(sums), new / SUMS)
        while not _rename(new, folder / name):
            if is_whole(folder / name, digest):  # somebody else has just sent it
                break
            aside = _name_unfinished(folder)
            with suppress(FileNotFoundError):  # an upload at the same time mends it too
                (folder / name).rename(aside)
            with suppress(OSError):  # pods may have it mounted: kept, if it is ours, for a day
                os.utime(aside)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def is_whole(folder: Path, digest: str) -> bool:
    """Whether all files that the digest stands for are in a folder as they were sent."""
    try:
        sums = (folder / SUMS).read_bytes()
        if sha256(sums).hexdigest() != digest:
            return False
        found = {_describe_file(each, folder) for each in folder.rglob("*") if each.is_file()}
    except OSError:
        return False
    return found.issuperset(f"{line}\n" for line in sums.decode().split("\n")[:-1])


def _describe_file(path: Path, root: Path) -> str:
    with path.open("rb") as file:
        return describe(path.relative_to(root).as_posix(), file_digest(file, "sha256").hexdigest())


def _name_unfinished(folder: Path) -> Path:
    return folder / f"{_UNFINISHED}{os.urandom(8).hex()}"


def _rename(new: Path, name: Path) -> bool:
    """Rename a folder, unless one with files has the name."""
    try:
        new.rename(name)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> str:
    path = PurePosixPath(member.name)
    source = archive.extractfile(member) if member.isreg() else None
    if source is None or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{member.name!r} is not a file of a code folder")
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    return describe(member.name, _save(source, root / path))


def _save(source: IO[bytes], path: Path) -> str:
    """Write a new file, and return its digest."""
    digest = sha256()
    with path.open("xb") as file:
        while block := source.read(_BLOCK):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def main(folder: str, name: str, digest: str) -> int:
    """Receive what comes; returns the exit code."""
    os.umask(0o002)  # jobs with other users may share the claim
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|", encoding="utf-8") as archive:
        try:
            receive(archive, Path(folder), name, digest)
        except (OSError, ValueError, tarfile.TarError) as error:
            sys.stderr.write(f"{error}\n")
            for _ in archive:  # up to its end, or whoever sends it would not read the error
                pass
            return 1
    return 0


if __name__ == "__main__":
    if sys.argv[3:]:
        sys.exit(main(*sys.argv[1:]))
    sys.exit(not is_whole(Path(sys.argv[1]), sys.argv[2]))
