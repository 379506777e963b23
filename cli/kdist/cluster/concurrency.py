"""Optimistic concurrency: a change contains the uid and resourceVersion of the object that was
read. If the object has changed since, the API server answers 409, and the object is read and
changed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kdist.cluster.api_errors import ApiError

_ATTEMPTS = 5  # attempts; controllers write objects between our read and our write
_IDENTITY = ("uid", "resourceVersion")
# If the object does not exist, an apply creates it whatever version it contains. An object that
# somebody creates in the meantime never has version 1, which etcd has before its first write: the
# apply then gets 409, and the object is read.
ABSENT = {"metadata": {"resourceVersion": "1"}}
T = TypeVar("T")


def identify(seen: Mapping[str, Any]) -> dict[str, Any]:
    """The uid and resourceVersion of an object; those that it has."""
    return {key: seen["metadata"][key] for key in _IDENTITY if key in seen["metadata"]}


def guard(body: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    """Add the uid and resourceVersion of `seen` to `body`: the server answers 409 if the object
    has changed since.
    """
    return {**body, "metadata": {**(body.get("metadata") or {}), **identify(seen)}}


def retry_on_conflict(send: Callable[[], T]) -> T:
    """Call `send`, which reads and changes an object, and repeat it if somebody else has changed
    the object in between. Raises `ApiError` after the last attempt.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            return send()
        except ApiError as error:
            if error.status != 409 or error.owners or not left:
                raise
    raise AssertionError
