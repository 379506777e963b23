"""Waiting that a busy machine does not fail: what should happen soon is given longer where
everything takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_LOOK_SECONDS = 0.02


def soon(condition: Callable[[], Any], seconds: float = 2.0) -> bool:
    """Whether `condition` comes true within `seconds`, counted in looks: where a look is slow,
    there may be as many of them.
    """
    for _ in range(round(seconds / _LOOK_SECONDS)):
        if condition():
            return True
        time.sleep(_LOOK_SECONDS)
    return bool(condition())
