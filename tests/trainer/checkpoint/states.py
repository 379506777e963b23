"""Small training states made from a seed, and stores opened the way a loop opens them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Checkpointing, Every, Keep
from kdist_trainer.distributed.checkpoint_group import RankInfo

FINGERPRINT = "data-1"


@dataclass(frozen=True)
class Alone:
    """A world of one rank."""

    generation: int = 1
    rank: int = 0
    size: int = 1


def make_state(seed: int, *, width: int = 8) -> dict[str, Any]:
    """Tensors of several dtypes and shapes, and the plain values that optimizers keep, in the
    nesting DCP gives them.
    """
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    model = {
        "fc.weight": tensor(width, width),
        "fc.bias": tensor(width),
        "norm.scale": tensor(width, dtype=torch.bfloat16),
        "norm.count": torch.tensor(seed),
        "embedding": tensor(4, width, dtype=torch.float64),
        "nothing": tensor(0, 3),
    }
    moments = {
        name: {"step": torch.tensor(float(seed)), "exp_avg": tensor(width, width)}
        for name in ("fc.weight", "embedding")
    }
    group = {
        "lr": seed * 0.1,
        "betas": (0.9, 0.999),
        "params": ["fc.weight", "embedding"],
        "fused": None,
        "maximize": False,
    }
    return {"model": model, "optimizer": {"state": moments, "param_groups": [group]}}


def digest_of(state: dict[str, Any]) -> str:
    """Digest of every bit of a state."""
    digest = hashlib.sha256()
    flat, _ = flatten_state_dict(state)
    for name, value in sorted(flat.items()):
        if isinstance(value, torch.Tensor):
            content = (
                value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                if value.numel()
                else b""
            )
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\0".encode() + content)
        else:
            digest.update(f"{name} {value!r}\0".encode())
    return digest.hexdigest()


def position(step: int) -> dict[str, Any]:
    """What `state.json` keeps of a training at `step`."""
    return {"step": step, "samples_seen": step * 32, "fingerprint": FINGERPRINT}


_BY_CLOCK = Every(seconds=300)


def open_store(
    root: StoragePath,
    world: RankInfo | None = None,
    *,
    mode: Literal["async", "blocking"] = "blocking",
    keep: int | Keep = 3,
    every: Every = _BY_CLOCK,
    run_id: str = "run-1",
    take_over: bool = False,
    generation: int = 1,
    is_known: bool = False,
    spared: Collection[str] = (),
) -> CheckpointManager:
    """A store on `root`; without a world that of a single rank."""
    kept = Keep.of(keep) if isinstance(keep, int) else keep
    config = Checkpointing(mode=mode, keep=kept, every=every)
    ranks = world or Alone(generation)
    return CheckpointManager(
        root,
        world=ranks,
        run_id=run_id,
        config=config,
        job={"name": "config-1"},
        take_over=take_over,
        is_known=is_known,
        spared=spared,
    )


def opened(
    root: Path, *, keep: int | Keep = 3, blocking: bool = True, every: Every = _BY_CLOCK
) -> CheckpointManager:
    """A store on an empty folder, ready to save."""
    mode: Literal["async", "blocking"] = "blocking" if blocking else "async"
    store = open_store(root, keep=keep, mode=mode, every=every)
    assert load(store) is None
    return store


def save(store: CheckpointManager, step: int) -> SaveResult:
    """Save `make_state(step)` as of that step, wait for it and return what became of it."""
    results: list[SaveResult] = []
    store.on_result = results.append
    store.save(make_state(step), position(step), step=step)
    store.wait()
    return results[-1]


def load(store: CheckpointManager) -> int | None:
    """Load into a state of other content; return the step, after comparing every bit with that
    step's state.
    """
    tensors = make_state(999)
    state = store.load(tensors, fingerprint=FINGERPRINT)
    if state is None:
        assert digest_of(tensors) == digest_of(make_state(999)), (
            "nothing was loaded, and yet the state has changed"
        )
        return None
    step = int(state["step"])
    assert state == position(step)
    assert digest_of(tensors) == digest_of(make_state(step)), (
        f"what was loaded is not the state of step {step}"
    )
    return step


def generations(root: Path) -> Iterator[int]:
    """Growing generations, beginning after those that have ever locked `root`."""
    last = max((int(path.stem[1:]) for path in (root / "lock").glob("e*.json")), default=0)
    while True:
        last += 1
        yield last


def resumable_step(root: Path) -> int | None:
    """The step that the next group of the run would resume from, every bit of it compared."""
    return load(open_store(root, generation=next(generations(root))))
