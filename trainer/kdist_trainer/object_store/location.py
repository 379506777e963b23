"""Where objects are stored: a URL and how its service is reached. All of it is text that may be
shown: credentials come from the environment alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

SCHEMES: Final = ("s3", "gs", "az")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# What no store and no client of ours encodes differently.
_NAME = re.compile(r"[A-Za-z0-9 !$&'()+,\-.:;=@_/]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST_NAME = 900
_REGION = re.compile(r"[a-z0-9-]*")


@dataclass(frozen=True)
class ObjectLocation:
    """A bucket and a prefix in it, such as `s3://bucket/prefix`; `az://` names a container.

    Raises `ValueError` if it is none, or if it contains a credential.
    """

    url: str
    endpoint: str = ""
    """URL of the service, if it is not the cloud's own."""
    region: str = ""
    """Of S3; empty for `AWS_REGION`."""

    def __post_init__(self) -> None:
        parts = _split(self.url, "location")
        if parts.scheme not in SCHEMES:
            known = ", ".join(f"{one}://" for one in SCHEMES)
            raise ValueError(f"a location starts with one of {known}, not {parts.scheme}://")
        if _BUCKET.fullmatch(parts.netloc) is None:
            raise ValueError(f"{parts.netloc!r} is no name of a bucket")
        prefix = parts.path.strip("/")
        if prefix:
            check_name(prefix)
        if self.endpoint:
            endpoint = _split(self.endpoint, "endpoint")
            if endpoint.scheme not in {"http", "https"} or not endpoint.netloc:
                raise ValueError("an endpoint starts with http:// or https:// and names a host")
        if _REGION.fullmatch(self.region) is None:
            raise ValueError(f"{self.region!r} is no region")
        object.__setattr__(self, "url", f"{parts.scheme}://{parts.netloc}/{prefix}".rstrip("/"))
        object.__setattr__(self, "endpoint", self.endpoint.rstrip("/"))

    @property
    def scheme(self) -> str:
        """One of `SCHEMES`."""
        return urlsplit(self.url).scheme

    @property
    def bucket(self) -> str:
        """Name of the bucket or container."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """What all names in it start with, without a slash at either end; empty for the bucket."""
        return urlsplit(self.url).path.strip("/")

    def __str__(self) -> str:
        return self.url


def check_name(name: str) -> None:
    """Raise `ValueError` unless this can be the name of an object: parts of ASCII letters, digits
    and some signs, separated by single slashes.
    """
    parts = name.split("/")
    if (
        _NAME.fullmatch(name) is None
        or len(name) > _LONGEST_NAME
        or any(part in {"", ".", ".."} for part in parts)
    ):
        raise ValueError(f"{name!r} is no name of an object")


def check_readable(name: str) -> None:
    """Raise `ValueError` unless an object with this name can be read: it has parts that are neither
    empty nor `.` or `..`, separated by single slashes, and no control characters.
    """
    if _CONTROL.search(name) or any(part in {"", ".", ".."} for part in name.split("/")):
        raise ValueError(f"{name!r} is no name of an object that can be read")


def _split(url: str, what: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"a {what} is a URL") from None
    if "@" in parts.netloc or parts.query or parts.fragment or "?" in url or "#" in url:
        # not repeated here, since it may contain a password
        raise ValueError(
            f"a {what} contains no user, password or query: credentials come from the environment"
        )
    return parts
