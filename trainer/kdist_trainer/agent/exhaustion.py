"""Keeps the agent's loop going while the process has no file descriptor left: what cannot be opened
in one pass may be opened in the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kdist_trainer import log
from kdist_trainer.descriptors import EXHAUSTED

_PAUSE_SECONDS = 0.1
_Result = TypeVar("_Result")


def repeat(look: Callable[[], _Result | None]) -> _Result:
    """Call `look` until it returns something, also after it has failed for want of descriptors."""
    has_warned = False
    while True:
        try:
            if (found := look()) is not None:
                return found
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            if not has_warned:
                message = f"the agent has no file descriptor left and tries again: {error}"
                log.warn("descriptors-exhausted", message=message)
            has_warned = True
            time.sleep(_PAUSE_SECONDS)
