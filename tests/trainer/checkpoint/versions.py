"""Checkpoints as other versions of the trainer leave them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the body of a checkpoint's manifest, and its own digest with it."""
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes())["manifest"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({"manifest": body, "sha256": hashlib.sha256(text).hexdigest()}))


def make_format_1(folder: Path) -> None:
    """Give a checkpoint the manifest of the first format: all digests are SHA-256."""

    def change(body: dict[str, Any]) -> None:
        body["format"] = 1
        for name, file in body["files"].items():
            content = (folder / name).read_bytes()
            body["files"][name] = {
                "size": file["size"],
                "sha256": hashlib.sha256(content).hexdigest(),
            }

    rewrite(folder, change)


def name_unknown_digests(folder: Path) -> None:
    """Give a checkpoint digests of an algorithm of the future."""

    def change(body: dict[str, Any]) -> None:
        body["files"] = {
            name: {"size": file["size"], "blake9": "00"} for name, file in body["files"].items()
        }

    rewrite(folder, change)
