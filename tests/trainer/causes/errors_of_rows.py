"""Makes the error that a row of the table of causes matches, of the class that is raised for it."""

from __future__ import annotations

import builtins
import importlib.util

from kdist_trainer.causes import Row

_MODULES = (
    "kdist_trainer.errors",
    "torch",
    "torch.distributed",
    "torch.multiprocessing",
    "socket",
    "zipfile",
    "gzip",
    "pickle",
    "lzma",
    "urllib.error",
    "urllib3.exceptions",
    "httpx",
)


def make(row: Row) -> BaseException:
    """An error that the row matches, as torch, Python or a library raises it."""
    name = _type_of(row)
    kind = _find(name)
    if row.errnos:
        return OSError(min(row.errnos), row.example)
    if name == "ProcessExitedException":
        return kind(row.example, 0, 1, 1)
    if name == "ModuleNotFoundError":
        return ModuleNotFoundError(row.example, name="timm")
    if name == "MaxRetryError":
        return _substitute(name)(row.example)
    error = kind(row.example) if row.example else kind()
    if name == "AcceleratorError" and row.device_codes:
        error.error_code = min(row.device_codes)  # type: ignore[attr-defined]  # as torch sets it
    return error


def _type_of(row: Row) -> str:
    if row.types:
        return row.types[0]
    if row.name == "cuda-out-of-memory":
        return "OutOfMemoryError"
    if row.device_codes:
        return "AcceleratorError"
    if row.name.startswith("nccl-"):
        return "DistBackendError"
    return "DistStoreError" if row.name.startswith("store-") else "RuntimeError"


def _substitute(name: str) -> type[Exception]:
    """Stands in for a class that is not installed, or needs more than a message."""
    return type(name, (OSError,), {"__module__": "urllib3.exceptions"})


def _find(name: str) -> type[BaseException]:
    found = getattr(builtins, name, None)
    for module in _MODULES:
        if found is None and importlib.util.find_spec(module.partition(".")[0]) is not None:
            found = getattr(importlib.import_module(module), name, None)
    return found if isinstance(found, type) else _substitute(name)
