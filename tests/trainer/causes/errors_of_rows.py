"""Makes the error that a row of the table of causes stands for, of the class that raises it."""

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
    """An error as torch, Python or a library raises it, that the row recognizes."""
    name = _type_of(row)
    kind = _find(name)
    if row.errnos:
        return OSError(min(row.errnos), row.example)
    if name == "ProcessExitedException":
        return kind(row.example, 0, 1, 1)
    if name == "ModuleNotFoundError":
        return ModuleNotFoundError(row.example, name="timm")
    if name == "MaxRetryError":
        return RuntimeErrorOf(name)(row.example)
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


def RuntimeErrorOf(name: str) -> type[Exception]:  # noqa: N802 - it stands for a class
    """A class of a library that cannot be made by a message alone."""
    return type(name, (OSError,), {"__module__": "urllib3.exceptions"})


def _find(name: str) -> type[BaseException]:
    found = getattr(builtins, name, None)
    for module in _MODULES:
        if found is None and importlib.util.find_spec(module.partition(".")[0]) is not None:
            found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type):
        return RuntimeErrorOf(name)
    return found
