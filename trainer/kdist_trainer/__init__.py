"""What every node of a training runs: an elastic agent and its ranks. It never imports `kdist`.

`python -m kdist_trainer` starts the agent (`agent`), which starts the ranks (`worker`, or
`run_script` for a torchrun script); `training` is the loop of a managed training. At the top level
are the entrypoints, the public API of workloads (`workload`, `stream`, `testing`), and what several
packages need. For a script of your own: `Reporter` and `Checkpointer`, imported on first use, since
an agent needs neither of them nor torch's checkpoints; `stop_requested`, which says whether it is
to stop; and `Retry`, which it raises to be tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdist_trainer.errors import Retry
    from kdist_trainer.metrics.transport import Reporter
    from kdist_trainer.script.api import Checkpointer
    from kdist_trainer.script.stop import stop_requested

__version__ = "0.2.0.dev0"
__all__ = ["Checkpointer", "Reporter", "Retry", "__version__", "stop_requested"]


def __getattr__(name: str) -> Any:
    """Import what a script asks for; `import kdist_trainer` itself stays light and free of
    torch.
    """
    if name == "Reporter":
        from kdist_trainer.metrics.transport import Reporter

        return Reporter
    if name == "Checkpointer":
        from kdist_trainer.script.api import Checkpointer

        return Checkpointer
    if name == "stop_requested":
        from kdist_trainer.script.stop import stop_requested

        return stop_requested
    if name == "Retry":
        from kdist_trainer.errors import Retry

        return Retry
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
