"""The generators of random numbers of each rank, as a file of its own in a framework's checkpoint:
for frameworks that save none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kdist_trainer import log, rng


def write(folder: Path, rank: int, **notes: bool) -> None:
    """Write the states of this rank's generators, and notes of where the training is."""
    torch.save({"generators": rng.read_generators(), **notes}, _file(folder, rank))


def read(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """What `write` has written of this rank; empty if the checkpoint has nothing of it. Rank 0 logs
    if the checkpoint is of another number of ranks.
    """
    saved = len(list(folder.glob(_file(folder, 0).name.replace("0", "*"))))
    if rank == 0 and saved not in (0, size):
        log.warn(
            "rank-parts-changed",
            saved=saved,
            ranks=size,
            message=(
                f"the checkpoint has the random numbers of {saved} ranks, and now there are {size}:"
                " those of ranks that are gone have no owner, and new ranks go on as the script "
                "seeds them"
            ),
        )
    file = _file(folder, rank)
    if not file.exists():
        return {}
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def _file(folder: Path, rank: int) -> Path:
    return folder / f"generators-{rank}.pt"
