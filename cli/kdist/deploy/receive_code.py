"""The program that takes the files of a code folder onto a claim, in a helper pod, as
`python -c SOURCE FOLDER NAME DIGEST`: from the tar archive on its standard input it makes the
folder NAME in FOLDER, if DIGEST is that of its SHA256SUMS.

Like the fault injector's, its own text is sent, so it imports the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import time
from hashlib import sha256
from pathlib import Path, PurePosixPath

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
    os.umask(0o002)  # jobs with other users may share the claim
    folder.mkdir(exist_ok=True)
    for left in folder.glob(f"{_UNFINISHED}*"):
        if time.time() - left.stat().st_mtime > _KEPT_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    new = folder / f"{_UNFINISHED}{os.urandom(8).hex()}"
    try:
        sums = "".join(_write(archive, each, new) for each in archive).encode()
        if sha256(sums).hexdigest() != digest:
            raise ValueError("the files have changed while they were sent: run the command again")
        (new / SUMS).write_bytes(sums)
        try:
            new.rename(folder / name)
        except OSError:  # unless somebody else has just sent the same
            if (folder / name / SUMS).read_bytes() != sums:
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> str:
    path = PurePosixPath(member.name)
    source = archive.extractfile(member) if member.isreg() else None
    if source is None or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{member.name!r} is not a file of a code folder")
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    digest = sha256()
    with (root / path).open("xb") as file:
        while block := source.read(_BLOCK):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return describe(member.name, digest.hexdigest())


def main(folder: str, name: str, digest: str) -> int:
    """Receive what comes; returns the exit code."""
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
    sys.exit(main(*sys.argv[1:]))
