"""What a checkpoint can hold besides whole tensors: values are copied into types that can be read
back without running code, or refused with the path that leads to them.

Numbers and texts of derived types, such as NumPy's, become Python's. Keys and tuples keep their
types. A NumPy array is stored as a tuple of its type, shape and bytes, so that nothing of NumPy's
has to be allowed where it is read.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import Counter, OrderedDict
from typing import IO, Any, Final

import numpy as np
import torch
from torch import Tensor

from kdist_trainer.checkpoint.state_json import UnloadableStateError

_NUMBERS: Final = (bool, int, float, complex)
_KEPT: Final = frozenset(
    {*_NUMBERS, type(None), bytes, bytearray, torch.dtype, torch.device, torch.Size}
)
_MAPPINGS: Final = (dict, OrderedDict, Counter)
_MOST_DEPTH: Final = 100
_REFUSED: Final = re.compile(r"GLOBAL (\S+) was not an allowed global")
_ARRAY: Final = "numpy.ndarray"
"""The first of the four values that stand for an array."""
_EMPTY_BYTES: Final = "bytes()"
"""The one value that stands for `b""`, which torch would refuse to read."""
_ARRAY_KINDS: Final = frozenset("biufcSU")
"""Kinds of arrays whose elements are no objects."""


def copy_value(value: Any, path: str, *, depth: int = 0) -> Any:
    """A copy of a value, in memory of its own, of types that `read_value` returns.

    Args:
        value: numbers, texts, tensors, NumPy arrays, and containers of these.
        path: what leads to it, for the error.
        depth: how deep it is nested in the value that was asked for.

    Raises:
        UnloadableStateError: a checkpoint cannot hold it.
    """
    kind = type(value)
    if kind in _KEPT:
        return value if value != b"" else (_EMPTY_BYTES,)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if depth > _MOST_DEPTH:
        raise UnloadableStateError(
            f"{path[:200]} is nested deeper than {_MOST_DEPTH} levels, or holds itself: a "
            "checkpoint cannot hold it"
        )
    inner = depth + 1
    if kind in (list, tuple):
        return kind(
            copy_value(one, f"{path}[{number}]", depth=inner) for number, one in enumerate(value)
        )
    if kind in _MAPPINGS:
        return kind(
            {
                copy_key(key, path): copy_value(one, f"{path}[{key!r:.80}]", depth=inner)
                for key, one in value.items()
            }
        )
    if kind is set:
        return {copy_key(one, path) for one in value}
    if isinstance(value, np.ndarray):
        return _describe_array(value, path)
    return _plain(value, path)


def copy_key(key: Any, path: str) -> Any:
    """The key of a dict or member of a set, of types that `read_value` returns; an equal one.

    Raises:
        UnloadableStateError: a checkpoint cannot hold it.
    """
    if type(key) is tuple:
        return tuple(copy_key(one, path) for one in key)
    if key != b"" and (key is None or isinstance(key, (*_NUMBERS, str, bytes, np.generic))):
        return _plain(key, f"the key {key!r:.80} of {path}")
    raise UnloadableStateError(
        f"{path} has a key of type {_name(key)}, which a checkpoint cannot hold: use texts, "
        "numbers or tuples of these as keys"
    )


def _plain(value: Any, path: str) -> Any:
    """A number or text of Python's own types."""
    if type(value) in _KEPT:
        return value
    if isinstance(value, np.generic):
        value = value.item()  # of a longdouble it is one again
        if type(value) in _KEPT:
            return value
    if isinstance(value, str):
        text = str.__str__(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UnloadableStateError(
                f"{path} is a text with half of a UTF-16 pair, which a checkpoint cannot hold"
            ) from None
        return text
    if isinstance(value, bytes):
        return bytes(memoryview(value))
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return complex(value.real, value.imag)
    raise UnloadableStateError(
        f"{path} is a {_name(value)}, which a checkpoint cannot hold: give numbers, texts or "
        "tensors, lists, tuples, dicts and sets of these, or leave it out of state_dict()"
    )


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _describe_array(array: np.ndarray[Any, Any], path: str) -> tuple[str, str, Any, bytearray]:
    if array.dtype.kind not in _ARRAY_KINDS or (array.dtype.kind in "fc" and array.itemsize > 16):
        raise UnloadableStateError(
            f"{path} is a NumPy array of {array.dtype}, which a checkpoint cannot hold: give "
            "numbers or texts"
        )
    return _ARRAY, array.dtype.str, array.shape, bytearray(array.tobytes())


def read_value(stream: IO[bytes]) -> Any:
    """Read a value that `copy_value` returned and `torch.save` wrote, without running code that is
    in it.

    Raises:
        Exception: what `torch.load` raises; it cannot be read.
    """
    try:
        value = torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own text is an advice to run what is in the file
        found = _REFUSED.search(str(error))
        raise ValueError(
            f"it refers to {found[1]:.100}, which is not on the allow-list"
            if found
            else f"it is no plain value ({str(error).rpartition('error: ')[2]:.200})"
        ) from None
    return _restore(value)


def _restore(value: Any) -> Any:
    """The value, with the arrays that it was saved with."""
    kind = type(value)
    if kind is tuple and value and type(value[0]) is str:
        if len(value) == 4 and value[0] == _ARRAY:
            return _make_array(value)
        if value == (_EMPTY_BYTES,):
            return b""
    if kind in (list, tuple):
        return kind(map(_restore, value))
    if kind in _MAPPINGS:
        return kind({key: _restore(one) for key, one in value.items()})
    return value


def _make_array(described: tuple[Any, ...]) -> Any:
    _, code, shape, content = described
    if not (type(code) is str and type(shape) is tuple and type(content) is bytearray):
        raise ValueError(f"a value says that it is a {_ARRAY}, and is none")
    dtype = np.dtype(code)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array is of {dtype}, which kdist never writes")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of {shape} holds {len(content)} bytes")
    array = np.empty(shape, dtype)
    if content:
        array[...] = np.frombuffer(content, dtype).reshape(shape)
    return array


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raise `UnloadableStateError` if a checkpoint cannot hold a tensor of this kind."""
    what = (
        "has no content (it is on the meta device)"
        if tensor.is_meta
        else f"is {str(tensor.layout).removeprefix('torch.')}"
        if tensor.layout is not torch.strided
        else "is quantized"
        if tensor.is_quantized
        else "is a nested tensor"
        if tensor.is_nested
        else None
    )
    if what is not None:
        raise UnloadableStateError(
            f"{name} is a tensor that {what}, which a checkpoint cannot hold: keep a dense tensor "
            "in the state, or leave it out of state_dict()"
        )
