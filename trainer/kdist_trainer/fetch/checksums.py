"""SHA256SUMS: the digests of files, as `sha256sum` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from kdist_trainer.errors import DataError

SUMS: Final = "SHA256SUMS"
LARGEST_SUMS: Final = 256 << 20
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPES: Final = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


def is_sums(name: str) -> bool:
    """Whether a file has digests."""
    return name.rpartition("/")[2] == SUMS


def parse_sums(text: bytes, where: str) -> dict[str, str]:
    """The digests in lower case, by the names as they are written.

    Args:
        text: the content of the file.
        where: its name and field, for errors.

    Raises:
        DataError: a line is not as `sha256sum` writes it.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.decode(errors="surrogateescape").split("\n"), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is None:
            raise DataError(
                f"{where}: line {number} is not a digest, two spaces and a name, as sha256sum "
                "writes it"
            )
        name = match[3]
        if match[1]:
            name = re.sub(r"\\[\\nr]", lambda escape: _ESCAPES[escape[0]], name)
        found[name] = match[2].lower()
    return found


def digests_below(
    sums: Mapping[str, str], folder: str, names: Iterable[str], *, where: str, all_wanted: bool
) -> dict[str, str]:
    """The digests of the files that are fetched.

    Args:
        sums: what `parse_sums` returned.
        folder: the one that SHA256SUMS is in, relative to that of all files; empty if it is that.
        names: of all files.
        where: the file of digests, for errors.
        all_wanted: whether a name that is not among the files is an error.

    Raises:
        DataError: there is such a name.
    """
    known = set(names)
    digests: dict[str, str] = {}
    for written, digest in sums.items():
        name = written.removeprefix("./")
        name = f"{folder}/{name}" if folder else name
        if name in known:
            digests[name] = digest
        elif all_wanted:
            raise DataError(f"{where}: names {written!r}, which is not there")
    return digests
