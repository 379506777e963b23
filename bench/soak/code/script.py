"""bench.soak's work as a script of one's own, with kdist's `Reporter` and `Checkpointer`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from soaked import STEP_SECONDS, hold_storage, make_model
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kdist_trainer import Checkpointer, Reporter


def main(hold: Path) -> None:
    """Train until somebody ends it."""
    hold_storage(hold)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = make_model()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        Reporter() as reporter,
        Checkpointer(model=module, optimizer=optimizer, every_seconds=5) as checkpointer,
    ):
        step = checkpointer.resume()
        while not checkpointer.stop_requested:
            step += 1
            time.sleep(STEP_SECONDS)
            optimizer.zero_grad()
            inputs, labels = torch.randn(16, 64), torch.randint(10, (16,))
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            reporter.step(loss=loss.item(), samples=len(inputs))
            checkpointer.maybe_save(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
