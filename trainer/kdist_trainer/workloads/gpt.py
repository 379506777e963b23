"""gpt: a byte-level language model that reads the Python source of the installed torch package.

The text is real, a few megabytes large, and available wherever torch is: a laptop and an image see
the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kdist_trainer.config.workload_options import GptOptions
from kdist_trainer.errors import ConfigError, DataError
from kdist_trainer.workload import Samples, Split, Workload, WorkloadContext

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

BYTES = 256
TEST_SHARE = 20
"""The last 1/20 of the bytes is the test split."""


class Attention(nn.Module):
    """Causal self-attention over (batch, seq, width)."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.dropout = options.dropout
        # grouped by head, so that each rank can compute some of the heads
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.out = nn.Linear(options.width, options.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        query, key, value = (
            self.qkv(x).view(batch, seq, -1, 3, width // self.heads).permute(3, 0, 2, 1, 4)
        )
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and feed-forward, each with a residual connection."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        width = options.width
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(options)
        self.forward_part = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.forward_part(self.norm2(x)))  # type: ignore[no-any-return]


class InputEmbedding(nn.Module):
    """Embeds bytes and their positions: (batch, seq) to (batch, seq, width)."""

    def __init__(self, bytes_: nn.Embedding, places: nn.Embedding) -> None:
        super().__init__()
        self.bytes = bytes_
        self.places = places

    def forward(self, text: Tensor) -> Tensor:
        return self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Maps bytes (batch, seq) to the scores of the next byte (batch, seq, 256)."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, options.width)
        self.places = nn.Embedding(options.block, options.width)
        self.layers = nn.Sequential(*(Layer(options) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.layers(x)))  # type: ignore[no-any-return]


class Windows:
    """Consecutive windows of a text: sample i has bytes i * block to (i + 1) * block, both
    included, since the last one is only predicted.
    """

    def __init__(self, text: Tensor, block: int) -> None:
        self.text = text
        self.block = block

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.block)

    def __getitem__(self, index: int) -> Tensor:
        return self.fetch(torch.tensor([index]))[0]

    def fetch(self, indices: Tensor) -> Tensor:
        """A whole batch: int64, shape (indices, block + 1)."""
        return self.text[(indices * self.block)[:, None] + torch.arange(self.block + 1)].long()


class Gpt(Workload):
    """Predicts the next byte. The loss is in nats per byte; the evaluation adds bits per byte."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.options = context.parse(GptOptions)
        self.units_per_sample = self.tokens_per_sample = self.options.block

    def model(self) -> nn.Module:
        """A transformer with pre-normalization."""
        return Transformer(self.options)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The layers."""
        assert isinstance(model, Transformer)  # noqa: S101 - it comes from `model`
        return list(model.layers)

    def chain(self, model: nn.Module) -> list[nn.Module]:
        """The embeddings, each layer, and the output head with its norm."""
        assert isinstance(model, Transformer)  # noqa: S101 - it comes from `model`
        return [
            InputEmbedding(model.bytes, model.places),
            *model.layers,
            nn.Sequential(model.norm, model.head),
        ]

    def tensor_plan(self, model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:  # noqa: ARG002 - all layers are alike
        """Megatron-style (M. Shoeybi et al., 2019): each rank computes some of the heads and of the
        feed-forward's hidden units, with one all-reduce after each of the two.
        """
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        if self.options.heads % ranks:
            raise ConfigError(
                f"train.options.heads: {self.options.heads} heads cannot be split over "
                f"{ranks} ranks (modelParallel)"
            )
        return {
            "layers.*.attention.qkv": ColwiseParallel(),
            "layers.*.attention.out": RowwiseParallel(),
            "layers.*.forward_part.0": ColwiseParallel(),
            "layers.*.forward_part.2": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

    def dataset(self, split: Split) -> Windows:
        """Windows of the first or of the last part of the text."""
        text = read_corpus(Path(torch.__file__).parent, self.options.corpus_bytes)
        boundary = len(text) - len(text) // TEST_SHARE
        return Windows(text[:boundary] if split == "train" else text[boundary:], self.options.block)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Cross-entropy of every next byte."""
        scores = model(batch[:, :-1])
        loss = functional.cross_entropy(
            scores.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum"
        )
        return loss, batch.shape[0] * self.options.block

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Add the loss in bits."""
        return {**means, "bits_per_byte": means["loss"] / math.log(2)}

    def fingerprint(self, samples: Samples) -> str:
        """Hash of the text and of the window length."""
        assert isinstance(samples, Windows)  # noqa: S101 - it comes from `dataset`
        return hashlib.sha256(
            samples.text.numpy().tobytes() + str(samples.block).encode()
        ).hexdigest()[:32]


def read_corpus(folder: Path, budget: int) -> Tensor:
    """At most `budget` bytes of the Python files below a folder, in the order of their paths:
    uint8, shape (bytes,). Raises `DataError` if there are less than 1024.
    """
    text = bytearray()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        text += path.read_bytes()
        if len(text) >= budget:
            break
    if len(text) < 1024:
        raise DataError(f"{folder} has only {len(text)} bytes of Python source")
    return torch.frombuffer(text[:budget], dtype=torch.uint8)
