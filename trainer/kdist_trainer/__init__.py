"""What every node of a training runs: an elastic agent and its ranks. It never imports `kdist`.

`python -m kdist_trainer` starts the agent (`agent`), which starts the ranks (`worker`, or
`run_script` for a torchrun script); `training` is the loop of a managed training. At the top level
are the entrypoints, the public API of workloads (`workload`, `stream`, `testing`), and what several
packages need. For a script of your own: `Reporter`, `Checkpointer` and `ShardedLoader`, imported on
first use, since an agent needs none of them nor torch's checkpoints; `stop_requested`, which says
whether it is to stop; and `Retry`, which it raises to be tried again.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdist_trainer.errors import Retry
    from kdist_trainer.metrics.transport import Reporter
    from kdist_trainer.script.api import Checkpointer
    from kdist_trainer.script.sharded_loader import ShardedLoader
    from kdist_trainer.script.stop import stop_requested

__version__ = "0.2.0.dev0"
__all__ = [
    "Checkpointer",
    "Reporter",
    "Retry",
    "ShardedLoader",
    "__version__",
    "stop_requested",
]

_MODULES = {
    "Checkpointer": "script.api",
    "Reporter": "metrics.transport",
    "Retry": "errors",
    "ShardedLoader": "script.sharded_loader",
    "stop_requested": "script.stop",
}


def __getattr__(name: str) -> Any:
    """Import what a script asks for; `import kdist_trainer` itself stays light and free of
    torch.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
