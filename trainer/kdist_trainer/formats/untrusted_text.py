"""The one reader of JSON: whatever a text contains, it returns plain values within bounds or raises
`MalformedTextError`.

Texts come from pods, users, object stores and API servers, so size and depth are bounded before
anything is parsed: the parser recurses into nested values, where neither a large recursion limit
nor a small one is a protection. Every number can become a float, and every string can be encoded.
Of a key that occurs twice, the last value counts. Free of torch and pydantic, since the command
line reads with it too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from msgspec import Struct
    from pydantic import BaseModel

MAX_BYTES: Final = 16 << 20
MAX_DEPTH: Final = 100
_MAX_DIGITS: Final = 300  # of an integer: a float can hold it
_OTHER_BYTES: Final = bytes(sorted(set(range(256)) - set(b'[]{}"')))
_AS_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
# the alternatives skip whole pairs and other escapes, so that what is replaced stands alone
_LONE_SURROGATE: Final = re.compile(
    r"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\[^u])"
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)

_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_Model = TypeVar("_Model", bound="BaseModel")
_Struct = TypeVar("_Struct", bound="Struct")


class MalformedTextError(ValueError):
    """A text is not what it should be, or exceeds a bound; the message says which."""


def too_deep(levels: int) -> MalformedTextError:
    """The error of a text that is nested deeper."""
    return MalformedTextError(f"is nested deeper than {levels} levels")


def finite_number(value: object) -> float | None:
    """A number of a document that was read; None if it is none, or not finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def number_of(document: Mapping[str, Any], name: str) -> float:
    """The finite number that a document has by this name; 0 without one."""
    return finite_number(document.get(name)) or 0.0


def parse_json(
    text: str | bytes,
    *,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    allow_nan: bool = False,
    keep_surrogates: bool = False,
) -> Any:
    """Parse one JSON document.

    Args:
        text: bytes must be UTF-8.
        max_bytes: the largest size.
        max_depth: how deep lists and objects may be nested.
        allow_nan: whether `NaN`, `Infinity` and numbers beyond a float's range are read, as Python
            writes and reads them.
        keep_surrogates: whether halves of UTF-16 pairs are kept, by which Python writes bytes of
            file names and variables that are not UTF-8; otherwise each becomes U+FFFD.

    Raises:
        MalformedTextError: it is no JSON document, or exceeds a bound.
    """
    if not isinstance(text, str | bytes):  # a field of a foreign document
        raise MalformedTextError("is no text")
    if len(text) > max_bytes:  # also before a text is encoded
        raise MalformedTextError(f"is larger than {max_bytes} bytes")
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > max_bytes:
        raise MalformedTextError(f"is larger than {max_bytes} bytes")
    if _is_deeper(data, max_depth):
        raise too_deep(max_depth)
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise MalformedTextError(f"is not UTF-8: {error}") from None
    if not keep_surrogates:
        text = _replace_surrogates(text)
    try:
        return (_WITH_NAN if allow_nan else _FINITE).decode(text)
    except MalformedTextError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise MalformedTextError(f"is not JSON: {error}") from None


def parse_object(text: str | bytes, **bounds: Any) -> dict[str, Any]:
    """Parse a JSON document that must be an object, as `parse_json` does. Raises
    `MalformedTextError`.
    """
    document = parse_json(text, **bounds)
    if not isinstance(document, dict):
        raise MalformedTextError("is not a JSON object")
    return document


def parse_first_value(text: str) -> Any:
    """Parse the JSON value that a text begins with, whatever follows it. Raises
    `MalformedTextError`.
    """
    if len(text) > MAX_BYTES or _is_deeper(text.encode("utf-8", "surrogatepass"), MAX_DEPTH):
        raise MalformedTextError("is too large, or nested too deep")
    try:
        value, _ = _WITH_NAN.raw_decode(_replace_surrogates(text))
    except (ValueError, RecursionError, MemoryError) as error:
        raise MalformedTextError(f"is not JSON: {error}") from None
    return value


def parse_model(model: type[_Model], text: str | bytes) -> _Model:
    """Parse a JSON document into a pydantic model.

    Raises:
        MalformedTextError: it is no JSON document, or exceeds a bound.
        pydantic.ValidationError: it is no document of this model; has every problem.
    """
    document = parse_json(text)
    # from JSON again: a strict model takes a list for a tuple only there
    return model.model_validate_json(json.dumps(document, allow_nan=False))


def parse_lines(struct: type[_Struct], text: bytes) -> list[_Struct]:
    """Parse JSON documents of one flat type, one on each line, much faster than `parse_json` does.
    Raises `MalformedTextError` if a line is no document of the type. `struct` has only numbers with
    bounds and strings, and forbids unknown fields: so nothing is nested, and every value is one
    that `parse_json` could have returned. Each line is complete.
    """
    from msgspec import MsgspecError
    from msgspec.json import Decoder

    try:
        return Decoder(struct).decode_lines(text)
    except (MsgspecError, UnicodeError, RecursionError, MemoryError) as error:
        raise MalformedTextError(f"is no line of this type: {error}") from None


def _is_deeper(data: bytes, limit: int) -> bool:
    """Whether the parser would recurse deeper than `limit` before it ends or meets a mistake."""
    if data.count(b"[") + data.count(b"{") <= limit:
        return False
    marks = _ESCAPE.sub(b"", data).translate(_AS_BRACKETS, _OTHER_BYTES)
    outside = b"".join(marks.split(b'"')[::2])
    return max(accumulate(ord("\\") - byte for byte in outside), default=0) > limit


def _replace_surrogates(text: str) -> str:
    if "\\ud" in text or "\\uD" in text:
        text = _LONE_SURROGATE.sub(lambda found: found[1] or "\\ufffd", text)
    if _SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise MalformedTextError(f"has an integer of {len(digits)} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise MalformedTextError("has a number beyond the range of a float")
    return value


def _refuse(name: str) -> float:
    raise MalformedTextError(f"has the number {name}")


_FINITE: Final = json.JSONDecoder(
    parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse
)
_WITH_NAN: Final = json.JSONDecoder(parse_int=_parse_int)
