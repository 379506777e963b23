"""The files of `spec.code` as the content of a ConfigMap, and the list of paths that restores their folders in a volume."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

from kdist.errors import KdistError

LIMIT: Final = 1024 * 1024
"""Bytes that a ConfigMap may hold."""
_LARGEST_SHOWN: Final = 3


def pack(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Values for templates: `digest`, `data` (text), `binary` (base64) and `items` (key, path), always in the same order.

    Raises `KdistError` where they are too big for a ConfigMap, with the files to blame.
    """
    _check_size(files)
    data: dict[str, str] = {}
    binary: dict[str, str] = {}
    items = []
    whole = sha256()
    for index, (path, content) in enumerate(sorted(files.items())):
        key = f"{index:04d}-{re.sub(r'[^-._a-zA-Z0-9]', '_', path)[-200:]}"
        items.append({"key": key, "path": path})
        whole.update(f"{path}\0{len(content)}\0".encode() + content)
        try:
            data[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = b64encode(content).decode()
    return {"digest": whole.hexdigest()[:10], "data": data, "binary": binary, "items": items}


def _check_size(files: Mapping[str, bytes]) -> None:
    total = sum(map(len, files.values()))
    if total > LIMIT:
        largest = sorted(files, key=lambda path: (-len(files[path]), path))[:_LARGEST_SHOWN]
        named = ", ".join(f"{path} ({len(files[path]) / 1024:.0f} KiB)" for path in largest)
        raise KdistError(
            f"spec.code holds {total / 1024:.0f} KiB, and a ConfigMap holds at most {LIMIT // 1024} KiB: {named}",
            hint="put data and weights on a claim (spec.data), large code into the image",
        )
