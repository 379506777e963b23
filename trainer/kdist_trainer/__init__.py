"""The part of kdist that every pod runs. For a script of your own: `Reporter` and `Checkpointer`,
loaded when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdist_trainer.checkpoint.script_api import Checkpointer
    from kdist_trainer.metrics.reporter import Reporter

__version__ = "0.1.0"
__all__ = ["Checkpointer", "Reporter", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what a script asks for; `import kdist_trainer` itself stays light and free of
    torch.
    """
    if name == "Reporter":
        from kdist_trainer.metrics.reporter import Reporter

        return Reporter
    if name == "Checkpointer":
        from kdist_trainer.checkpoint.script_api import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
