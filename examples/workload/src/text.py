"""A language model on a stream of files: the next character of Python's own library, read from
front to back.
"""

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kdist_trainer.stream import Stream
from kdist_trainer.workload import Samples, Split, Workload

BLOCK = 64
TEST = "textwrap.py"


class Library(Stream):
    """The files of a folder; a sample is a block of characters and the one after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[str]:
        return sorted(
            path.name
            for path in self.folder.glob("*.py")
            if path.stat().st_size > BLOCK and path.name != TEST
        )

    def read(self, file: str) -> Iterator[Tensor]:
        text = torch.frombuffer(
            bytearray((self.folder / file).read_bytes()), dtype=torch.uint8
        ).long()
        yield from text.unfold(0, BLOCK + 1, BLOCK)


class Characters(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.scores = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        remembered, _ = self.memory(self.embedding(text))
        scores: Tensor = self.scores(remembered)
        return scores


class Text(Workload):
    units_per_sample = tokens_per_sample = BLOCK

    def model(self) -> nn.Module:
        return Characters(self.context.options.get("width", 64))

    def dataset(self, split: Split) -> Samples | Stream:
        library = Library(Path(string.__file__).parent)
        return library if split == "train" else list(library.read(TEST))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        scores = model(batch[:, :-1])
        return functional.cross_entropy(
            scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        ), batch.shape[0] * BLOCK
