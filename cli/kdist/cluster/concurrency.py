"""Optimistic concurrency: a change names the uid and resourceVersion of the object that was read.
The API server refuses it with 409 for any other object, which is then read and changed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kdist.cluster.api_errors import ApiError

_RACES = 5  # with controllers, which write an object between our look at it and our change
_IDENTITY = ("uid", "resourceVersion")
# An object that is not there is made by an apply whatever version that names; one that somebody
# makes meanwhile never has the version 1, which is etcd's own before its first write, so it is
# refused with 409 and looked at.
ABSENT = {"metadata": {"resourceVersion": "1"}}
T = TypeVar("T")


def identify(seen: Mapping[str, Any]) -> dict[str, Any]:
    """The uid and resourceVersion of an object, as far as it has them."""
    return {key: seen["metadata"][key] for key in _IDENTITY if key in seen["metadata"]}


def guard(body: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    """`body` as a change of the very object that was seen, in the very state: of any other it is
    refused with 409.
    """
    return {**body, "metadata": {**(body.get("metadata") or {}), **identify(seen)}}


def retry_on_conflict(send: Callable[[], T]) -> T:
    """What `send` gives, which looks at an object and changes it; again where somebody else has
    changed it in between.
    """
    for left in reversed(range(_RACES)):
        try:
            return send()
        except ApiError as error:
            if error.status != 409 or error.owners or not left:
                raise
    raise AssertionError
