"""bench.compile's work: a model that torch.compile compiles, as a script and in the managed loop.

After each pass the rank notes in the file $COMPILED for how long it imported torch, for how long
torch.compile has worked, by torch's own counter, and when its first step was done. With $ARTIFACTS
the script begins with torch's own archive, and leaves one if there is none.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

IMPORTED = time.perf_counter() - BEGAN

from kdist_trainer.metrics.torch_internals import compile_seconds  # noqa: E402
from kdist_trainer.workload import Split, Workload  # noqa: E402


class Block(nn.Module):
    """A block of a perceptron with a norm and a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        """Of the same shape."""
        normed = self.norm(values)
        gated: Tensor = nn.functional.gelu(self.gate(normed)) * self.up(normed).tanh()
        down: Tensor = self.down(gated)
        return values + down


def build(blocks: int = 2) -> nn.Module:
    """The model: input [n, 64], output [n, 10]."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(blocks)), nn.Linear(64, 10))


def note() -> None:
    """Note what has been compiled so far."""
    found = {"imports": IMPORTED, "compile": compile_seconds()}
    Path(os.environ["COMPILED"]).write_text(json.dumps(found))


class Compiled(Workload):
    """Noise through the model, in the managed loop."""

    def model(self) -> nn.Module:
        """See `build`."""
        return build()

    def dataset(self, split: Split) -> TensorDataset:  # noqa: ARG002
        """Noise with labels."""
        return TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Cross-entropy, summed."""
        inputs, labels = batch
        summed = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        note()
        return summed, len(labels)


def main() -> None:
    """Train for three steps."""
    torch.set_num_threads(1)
    artifacts = Path(os.environ.get("ARTIFACTS", os.devnull))
    if artifacts.is_file():
        torch.compiler.load_cache_artifacts(artifacts.read_bytes())
    model = build()
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss: Tensor = model(torch.randn(16, 64)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own gap
        optimizer.step()
        optimizer.zero_grad()
    note()
    if "ARTIFACTS" in os.environ and not artifacts.exists():
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        artifacts.write_bytes(saved[0])


if __name__ == "__main__":
    main()
