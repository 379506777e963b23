"""The slices of kdist: options that nothing else in this package needs. Each is one package with
its logic, its texts and, where it has one, its command.

A slice imports what it builds on. No other module of this package imports a slice: whatever offers
one loads it here by name, when it is used. Without its package, kdist has everything but that
option. The controller imports `recovery`, and the tools for developers import `report`; `kdist`
itself offers programs the names of `api`.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Final

from kdist.errors import KdistError

COMMANDS: Final = {
    "bench": "bench",
    "convert": "convert",
    "dashboards": "dashboards",
    "doctor": "doctor",
    "drill": "drill",
    "profile": "profile",
    "recover": "recovery",
    "report": "report",
}
"""The commands of slices, and the package of each: its module `command` has the code."""


def is_installed(name: str) -> bool:
    """Whether this installation has a slice. A leftover folder of compiled files does not count."""
    # `kdist --help` asks for all of them: `find_spec` takes 0.1 ms each, and importing
    # pathlib several.
    package = __file__.rpartition(os.sep)[0]
    return os.access(f"{package}/{name}/__init__.py", os.R_OK)


def load(name: str, module: str) -> ModuleType:
    """Import a module of a slice. Raises `KdistError` if this installation has no such slice."""
    if not is_installed(name):
        raise KdistError(f"this installation of kdist has no package kdist.{name}")
    return import_module(f"kdist.{name}.{module}")
