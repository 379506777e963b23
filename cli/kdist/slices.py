"""The slices of kdist: options that nothing else needs, each in one package with its command, its
logic and its texts.

A slice imports what it builds on; nobody imports a slice, but what offers it loads it here, by name
and when it is used. Without its package, kdist has everything but that option.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Final

from kdist.errors import KdistError

COMMANDS: Final = {
    "bench": "bench",
    "dashboards": "dashboards",
    "doctor": "doctor",
    "drill": "drill",
    "profile": "profile",
    "recover": "recovery",
    "report": "report",
}
"""The commands of slices, and the package of each: its module `command` has the code."""


def is_installed(name: str) -> bool:
    """Whether this installation has a slice. Its folder may remain, with compiled files alone."""
    # `kdist --help` asks for all of them: `find_spec` takes 0.1 ms, and importing pathlib several.
    package = __file__.rpartition(os.sep)[0]
    return os.access(f"{package}/{name}/__init__.py", os.R_OK)


def load(name: str, module: str) -> ModuleType:
    """Import a module of a slice. Raises `KdistError` if this installation has no such slice."""
    if not is_installed(name):
        raise KdistError(f"this installation of kdist has no package kdist.{name}")
    return import_module(f"kdist.{name}.{module}")
