"""What a training computes by, as one digest: two starts with the same one run the same code.

It covers the job's `train` or `script` section, the Python files of the job's code and of the
package that its workload is from, and the versions of kdist and torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

import kdist_trainer
from kdist_trainer.config import TrainConfig
from kdist_trainer.json_text import encode_json

_MOST_FILES: Final = 2000
_MOST_NAMES: Final = 100_000
"""Names after which no further folder is looked into: there may be data below the code."""
_MOST_BYTES: Final = 1 << 20


def identify_code(config: TrainConfig, code: Path | None) -> str:
    """The digest. Files that cannot be read count by their names.

    Args:
        config: train.json.
        code: The folder of the job's code.
    """
    parts = {"job": config.to_job(), "kdist": kdist_trainer.__version__, "torch": torch.__version__}
    digest = hashlib.sha256(encode_json(parts, sort_keys=True).encode())
    workload = config.train.workload if config.train is not None else ""
    for root in ([] if code is None else [code]) + _find_package(workload):
        for path in _list_files(root):
            digest.update(os.fsencode(path.relative_to(root)) + b"\0")
            with suppress(OSError), path.open("rb") as file:
                digest.update(file.read(_MOST_BYTES))
    return digest.hexdigest()[:16]


def _find_package(workload: str) -> list[Path]:
    """The folders of the package of a workload `module:Class`, which is not imported."""
    module, separator, _ = workload.partition(":")
    if not separator:
        return []  # it is kdist's own
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    return [Path(each) for each in spec.submodule_search_locations or ()]


def _list_files(root: Path) -> Iterator[Path]:
    """The Python files below a folder in a fixed order, without those that are hidden."""
    left, names_left = _MOST_FILES, _MOST_NAMES
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__pycache__")))
        names_left -= len(names)
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(".py") and left and path.is_file():
                left -= 1
                yield path
        if not left or names_left < 0:
            return
