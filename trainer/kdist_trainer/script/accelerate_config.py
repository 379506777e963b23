"""What `accelerate config` asks for and a script lacks, since kdist takes the place of `accelerate
launch`, which alone reads it: said once, by rank 0.

The first accelerator of the process is compared, not the variables: what the script asks for by
itself, or a Trainer for it, is there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Final

from kdist_trainer import log

_ENGINES: Final = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""Kinds of training that `accelerate launch` turns on by `ACCELERATE_USE_…`."""


def compare_accelerator() -> None:
    """Have the first accelerator compared with what `accelerate config` has written, if it has."""
    cache = (
        os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface"
    )
    accelerator: Any = getattr(sys.modules["accelerate"], "Accelerator", None)
    try:
        path = Path(cache).expanduser() / "accelerate" / "default_config.yaml"
        if accelerator is None or not path.is_file():
            return
    except (OSError, RuntimeError):  # a home of somebody else, or none
        return
    begin = accelerator.__init__

    @wraps(begin)
    def init(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        accelerator.__init__ = begin
        try:
            known = importlib.import_module("accelerate.commands.config.config_args")
            lacks = list(_lacks(self, known.load_config_from_file(str(path))))
        except Exception as error:  # noqa: BLE001 - a file that is not used must not end a script
            lacks = [f"what cannot be read ({type(error).__name__}: {error})"]
        if lacks:
            what = f"{path} sets {', '.join(lacks)}, which this run does not use"
            how = "add to env what `accelerate launch --num_processes 1 --no_python env` prints"
            log.warn(
                "accelerate-config-unused",
                message=f"{what}: like torchrun, kdist does not read the file; {how}",
            )

    accelerator.__init__ = init


def _lacks(accelerator: Any, config: Any) -> Iterator[str]:
    """The settings of the file that this accelerator has not."""
    if config.mixed_precision not in {None, "no", accelerator.mixed_precision}:
        yield f"mixed_precision: {config.mixed_precision}"
    engine = config.distributed_type.value
    has_engine = f"ACCELERATE_USE_{engine}" in os.environ or engine == accelerator.distributed_type
    if engine in _ENGINES and not has_engine:
        yield f"distributed_type: {engine}"
    backend = config.dynamo_config.get("dynamo_backend", "NO")
    if backend != "NO" and accelerator.state.dynamo_plugin.backend == "NO":
        yield f"dynamo_backend: {backend}"
    if config.parallelism_config and accelerator.parallelism_config is None:
        yield "parallelism_config"
