"""Values written as Python expressions, as far as an expression can say all of a value."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import inspect
import logging
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

Refer = Callable[[Any], str]
"""Gives the expression of a module, class or function; raises `UnwritableError`."""


class UnwritableError(Exception):
    """This value cannot be written as an expression; `path` leads to it from the whole."""

    def __init__(self, value: object, path: str = "") -> None:
        super().__init__()
        self.value = value
        self.path = path


def is_constant(value: object) -> bool:
    """Whether its text says all of it."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except Exception:  # noqa: BLE001 - of the value's own repr or ==
        return False


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """As `getattr`, of a value whose own `__getattr__` may raise any error."""
    with suppress(Exception):
        return getattr(value, name)
    return default


def write(value: Any, refer: Refer) -> str:
    """The expression that has this value. Raises `UnwritableError`."""
    try:
        return _write(value, refer)
    except RecursionError:  # it contains itself
        raise UnwritableError(value) from None


def write_class(kind: Any, refer: Refer) -> str | None:
    """The call that makes a class; None for those of a class statement."""
    stated = {"__annotations__", "__annotate_func__", "__orig_bases__"} & vars(kind).keys()
    if not _is_named_tuple(kind) or stated:
        return None
    defaults = write([*getattr(kind, "_field_defaults", {}).values()], refer)
    made = f"{refer(collections)}.namedtuple({kind.__name__!r}, {kind._fields!r}"
    return f"{made}, defaults={defaults})"


def _is_named_tuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def _write_part(value: Any, refer: Refer, path: str) -> str:
    try:
        return _write(value, refer)
    except UnwritableError as error:
        raise UnwritableError(error.value, path + error.path) from None


def _write_items(values: Iterable[object], refer: Refer) -> str:
    return ", ".join(_write_part(each, refer, f"[{place}]") for place, each in enumerate(values))


def _write_fields(values: Mapping[str, object], refer: Refer) -> str:
    items = values.items()
    return ", ".join(f"{name}={_write_part(each, refer, f'.{name}')}" for name, each in items)


def _write(value: Any, refer: Refer) -> str:
    kind = type(value)
    is_collection = isinstance(value, dict | list | tuple | set | frozenset)
    if (not is_collection and is_constant(value)) or value is ... or kind is range:
        return repr(value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType | ModuleType):
        return refer(value)
    if isinstance(value, Enum) and value.name in kind.__members__:
        return f"{refer(kind)}.{value.name}"
    if isinstance(value, pathlib.PurePath) and kind.__module__.startswith("pathlib"):
        name = "Path" if isinstance(value, pathlib.Path) else kind.__name__
        return f"{refer(pathlib)}.{name}({str(value)!r})"
    if isinstance(value, logging.Logger) and logging.getLogger(value.name) is value:
        return f"{refer(logging)}.getLogger({value.name!r})"
    if kind.__module__ == "torch" and kind.__name__ in {"device", "dtype"}:
        torch = refer(sys.modules["torch"])
        return repr(value) if kind.__name__ == "dtype" else f"{torch}.device({str(value)!r})"
    if kind.__module__.startswith("kdist."):  # such as a handle, whose fields are nobody's
        raise UnwritableError(value)
    if hasattr(kind, "__dataclass_fields__") and not hasattr(kind, "__post_init__"):
        fields = {each.name: attribute(value, each.name) for each in dataclasses.fields(kind)}
        known = inspect.signature(kind).parameters
        if {*fields} == {*known} == {*getattr(value, "__dict__", fields)}:
            return f"{refer(kind)}({_write_fields(fields, refer)})"
    elif _is_named_tuple(kind):
        return f"{refer(kind)}({_write_items(value, refer)})"
    elif kind is functools.partial:
        given = [_write(each, refer) for each in (value.func, *value.args)]
        given += [_write_fields(value.keywords, refer)] if value.keywords else []
        return f"{refer(functools)}.partial({', '.join(given)})"
    elif kind is re.Pattern:
        return f"{refer(re)}.compile({value.pattern!r}, {value.flags})"
    elif kind is dict:
        items = [
            (_write(key, refer), _write_part(value[key], refer, f"[{key!r}]")) for key in value
        ]
        return "{" + ", ".join(f"{key}: {each}" for key, each in items) + "}"
    elif kind is list:
        return f"[{_write_items(value, refer)}]"
    elif kind is tuple:
        return f"({_write_items(value, refer)}{',' * (len(value) == 1)})"
    elif kind in {set, frozenset}:  # whose own order is another one in each process
        written = sorted(_write(each, refer) for each in value)
        return f"{kind.__name__}([{', '.join(written)}])"
    elif kind is float:  # that is not finite
        return f"float({str(value)!r})"
    raise UnwritableError(value)
