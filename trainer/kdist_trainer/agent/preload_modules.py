"""Names the modules that agents and workers import before their work begins.

Importing torch and everything else that the first training step needs takes about six seconds of
CPU time. A process that forks agents or workers imports these modules once for all of them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from kdist_trainer.untrusted_text import parse_json

AGENT_MODULES = (
    "kdist_trainer.agent.agent",
    "kdist_trainer.rendezvous.handler",
    "kdist_trainer.agent.worker_entry",
)
RANK_MODULES = ("torch.distributed.elastic.multiprocessing.api", "kdist_trainer.agent.worker_entry")
_TRAINING = (
    "torch.nn.parallel",
    "torch._dynamo",  # the first DDP(...) imports it: most of a second
    "torch.distributed.checkpoint.state_dict",
    "kdist_trainer.worker",
    "encodings.idna",  # the first name of a host that is resolved
)
_EVENT_FILES = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)
"""Imported by rank 0 only, which may be a new process while all other ranks wait for it."""


def training_modules(config: Path) -> Iterator[str]:
    """The modules that the workers of the managed training at `config` import. A user's own
    workload is not one of them, since it may do anything on import.
    """
    yield from _TRAINING
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        train = parse_json(config.read_bytes())["train"]
        if train.get("tensorboard") != "off":
            yield from _EVENT_FILES
        name: str = train["workload"]
        if name.isidentifier():
            yield f"kdist_trainer.workloads.{name}"


def register_gloo() -> None:
    """Have torch register its backend gloo, for which it reads the metadata of every installed
    package: some ten milliseconds in each process that makes a process group.
    """
    from torch.distributed.distributed_c10d import BackendConfig

    BackendConfig("gloo")


def look_up_operators() -> None:
    """Have torch look up the operators of collectives, which each rank that records its collectives
    needs before its first one.
    """
    from kdist_trainer.instrumentation import torch_internals

    for operator in torch_internals.operators():
        torch_internals.overload(torch_internals.COLLECTIVES, operator)


def build_config() -> None:
    """Have pydantic build what reads and writes train.json, which it otherwise does in each process
    at the first use.
    """
    from kdist_trainer.config import TrainConfig, Training

    for model in (TrainConfig, Training):
        model.model_rebuild()


def import_all(modules: Iterable[str]) -> None:
    """Import the modules, ignoring those that fail: their users will raise the error.

    Garbage is collected after it: imports leave little, and looking for it takes a quarter of the
    time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    finally:
        if enabled:
            gc.enable()
