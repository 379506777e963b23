"""Lines that a script of a training framework adds, to be shown, saved and resumed by kdist.

    from kdist_trainer.integrations import KdistTrainerCallback    # transformers: Trainer
    from kdist_trainer.integrations import KdistCallback           # Lightning: Trainer
    from kdist_trainer.integrations import KdistTracker            # Accelerate: log_with

Each is named after the framework's class that it extends, and imports the framework when it is
asked for: `import kdist_trainer.integrations` imports none. Outside kdist they do nothing, so that
the script still runs under torchrun. `HfStream` is for workloads: a streaming set of Hugging Face
`datasets` in the managed loop.

`framework` is what the integrations of frameworks have in common: when to save and to stop, the
framework's own files committed and verified as kdist's own are, and the names that they log under.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdist_trainer.integrations.accelerate import KdistTracker
    from kdist_trainer.integrations.datasets import HfStream
    from kdist_trainer.integrations.lightning import KdistCallback
    from kdist_trainer.integrations.transformers import KdistTrainerCallback

__all__ = ["HfStream", "KdistCallback", "KdistTracker", "KdistTrainerCallback"]


_MODULES = {
    "HfStream": "datasets",
    "KdistCallback": "lightning",
    "KdistTracker": "accelerate",
    "KdistTrainerCallback": "transformers",
}


def __getattr__(name: str) -> Any:
    """Import the one that a script asks for, with its framework."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
