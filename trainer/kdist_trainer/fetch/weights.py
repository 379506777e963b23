"""Which files of a model are its weights: safetensors files, their index, and its configuration."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from kdist_trainer.errors import DataError
from kdist_trainer.untrusted_text import parse_json

INDEX: Final = ".safetensors.index.json"
LARGEST_INDEX: Final = 256 << 20
_FURTHER: Final = frozenset({"config.json", "SHA256SUMS"})


def is_weights(name: str) -> bool:
    """Whether a file of a repository is needed to start from its weights. Those in folders are of
    other models or other formats, and are never read.
    """
    return "/" not in name and (name.endswith((".safetensors", INDEX)) or name in _FURTHER)


def shards_of(index: bytes, where: str) -> list[str]:
    """The names of the files in an index.

    Args:
        index: its content.
        where: its field and URL, for errors.

    Raises:
        DataError: it is no index, or names files that are not next to it.
    """
    try:
        names = set(parse_json(index, max_bytes=LARGEST_INDEX)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{where}: is no index of safetensors files") from None
    if not names or not all(
        isinstance(name, str)
        and PurePosixPath(name).name == name
        and name not in ("", "..")
        and name.isprintable()
        for name in names
    ):
        raise DataError(f"{where}: its weight_map must name files next to it")
    return sorted(names)
