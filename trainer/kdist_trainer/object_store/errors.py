"""Errors of an object store, each with a message of one sentence, without secrets."""

from __future__ import annotations

import errno
import html
import os
import re
from dataclasses import dataclass
from enum import Enum, auto


class ObjectStoreError(OSError):
    """A request to an object store failed; `errno` is EIO, or ENOSPC for a quota."""

    def __str__(self) -> str:
        """The message without the number, which no disk has reported."""
        return str(self.strerror)


class ObjectAccessError(ObjectStoreError):
    """The store refuses the credential, or there is none; `errno` is EACCES."""


class ObjectCredentialError(ObjectAccessError):
    """There is no credential."""


class ObjectChangedError(ObjectStoreError):
    """Another writer has changed or deleted the object."""


class ObjectTimeoutError(ObjectStoreError, TimeoutError):
    """No attempt has succeeded within the time limit; `errno` is ETIMEDOUT."""


class FailureKind(Enum):
    """What a failed request means."""

    MISSING = auto()
    EXISTS = auto()
    """A conditional creation met an existing object, or another creation."""
    CHANGED = auto()
    """The object does not have the required tag."""
    TOO_LARGE = auto()
    UNIDENTIFIED = auto()
    """No credential was found."""
    DENIED = auto()
    FULL = auto()
    REJECTED = auto()
    """Permanently, for any other reason."""
    TRANSIENT = auto()
    """The request may have been executed, and may be tried again."""


@dataclass
class RequestError(Exception):
    """One request failed; callers of the package never see it."""

    kind: FailureKind
    cause: str


_STATUS = re.compile(r"status code: (\d{3})(?: ([A-Z][A-Za-z -]*))?")
_CODE = re.compile(r"<Code>\s*([\w.-]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*(.{1,200}?)[\s.]*[<\n]")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_FULL = re.compile(r"quota|StorageFull|InsufficientStorage|AccountProblem", re.IGNORECASE)
# S3's errors with status 400 after which another attempt may succeed.
_AGAIN = frozenset({"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"})
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
# Instance metadata and token services; the library hides the URLs of the latter.
_IDENTITY = re.compile(
    r"/latest/(?:api/token|meta-data)|computeMetadata|metadata/identity|169\.254\.|"
    r"performing \w+ REDACTED|token file"
)
_TRANSPORT = {
    "InvalidCertificate": (FailureKind.REJECTED, "its certificate is not valid"),
    "ConnectionRefused": (FailureKind.TRANSIENT, "connection refused"),
    "dns error": (FailureKind.TRANSIENT, "its host name is not known"),
    "TimedOut": (FailureKind.TRANSIENT, "no reply in time"),
    "kind: Timeout": (FailureKind.TRANSIENT, "no reply in time"),
    "kind: Connect": (FailureKind.TRANSIENT, "no connection"),
    "IncompleteBody": (FailureKind.TRANSIENT, "the reply was cut short"),
    "IncompleteMessage": (FailureKind.TRANSIENT, "the connection ended before the reply"),
    "ConnectionReset": (FailureKind.TRANSIENT, "the connection was reset"),
}


def request_error(error: Exception) -> RequestError:
    """What an error of the client library means, judged by its type and text."""
    name, text = type(error).__name__, str(error)
    summary = text.split("\n\nDebug source")[0]
    status = _STATUS.search(summary)
    cause = _cause(summary, text, status)
    if name == "AlreadyExistsError" and "OperationAborted" not in summary:
        return RequestError(FailureKind.EXISTS, cause)
    if name == "PreconditionError":
        return RequestError(FailureKind.CHANGED, cause)
    if _NO_BUCKET.search(summary):
        return RequestError(FailureKind.REJECTED, "there is no such bucket")
    number = int(status[1]) if status is not None else 0
    if _IDENTITY.search(summary) and number < 500 and number != 429:
        return RequestError(FailureKind.UNIDENTIFIED, f"no credential could be obtained ({cause})")
    if isinstance(error, FileNotFoundError):
        # A store names what is missing, except in a reply to HEAD; a proxy in front of it does not.
        is_named = _CODE.search(summary) or "performing HEAD" in summary or number != 404
        return RequestError(FailureKind.MISSING if is_named else FailureKind.TRANSIENT, cause)
    if number:
        return RequestError(_kind_of_status(number, summary), cause)
    if "(code: AccessDenied)" in summary:
        # one of many objects could not be deleted
        return RequestError(FailureKind.DENIED, cause)
    if name in {"InvalidPathError", "NotSupportedError", "ValueError", "TypeError"}:
        return RequestError(FailureKind.REJECTED, cause)
    kind = next(
        (kind for word, (kind, _) in _TRANSPORT.items() if word in text), FailureKind.TRANSIENT
    )
    return RequestError(kind, cause)


def _kind_of_status(status: int, summary: str) -> FailureKind:
    code = match[1] if (match := _CODE.search(summary)) else ""
    if status == 507 or _FULL.search(code):
        return FailureKind.FULL
    if status >= 500 or status in {408, 409, 429} or code in _AGAIN:
        return FailureKind.TRANSIENT
    if status in {401, 403} or code in _EXPIRED:
        return FailureKind.DENIED
    return FailureKind.CHANGED if status == 412 else FailureKind.REJECTED


def _cause(summary: str, text: str, status: re.Match[str] | None) -> str:
    if status is None:
        for word, (_, sentence) in _TRANSPORT.items():
            if word in text:
                return sentence
        return _without_secrets(summary.splitlines()[0][:200] if summary else "unknown error")
    code, message = _CODE.search(summary), _MESSAGE.search(summary)
    if code is None:
        return f"status {status[1]} {status[2] or ''}".rstrip()
    said = f": {html.unescape(message[1])}" if message else ""
    return _without_secrets(f"status {status[1]} {code[1]}{said}")


_SECRET = re.compile(r"(?:SECRET|TOKEN|_KEY|PASSWORD|SAS)(?!\w*_(?:FILE|URI|URL)$)")
_SHORTEST_SECRET = 6


def _without_secrets(text: str) -> str:
    """Remove the queries of URLs, which may be signatures, and secrets of the environment."""
    shown = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text)
    for name, value in os.environ.items():
        is_cloud = name.startswith(("AWS_", "AZURE_", "GOOGLE_"))
        if is_cloud and _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            shown = shown.replace(value, "***")
    return shown


_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if the key is "
    "temporary) to a key that may use the bucket, or give the pod's identity that right",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of an account that may use the bucket, "
    "or give the pod's identity that right",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY to those of an account "
    "that may use the container, or give the pod's identity that right",
}


def public_error(operation: str, scheme: str, error: RequestError) -> OSError:
    """The error to raise to a caller after the last attempt of, say, `get s3://bucket/name`."""
    sentence = f"cannot {operation}: {error.cause}"
    if error.kind is FailureKind.MISSING:
        return FileNotFoundError(errno.ENOENT, sentence)
    if error.kind in {FailureKind.DENIED, FailureKind.UNIDENTIFIED}:
        kind = ObjectAccessError if error.kind is FailureKind.DENIED else ObjectCredentialError
        return kind(errno.EACCES, f"{sentence}; {_HINTS[scheme]}")
    if error.kind is FailureKind.FULL:
        return ObjectStoreError(errno.ENOSPC, sentence)
    if error.kind is FailureKind.TOO_LARGE:
        return ObjectStoreError(errno.EFBIG, sentence)
    if error.kind is FailureKind.CHANGED:
        return ObjectChangedError(errno.EIO, sentence)
    if error.kind is FailureKind.TRANSIENT:
        return ObjectTimeoutError(errno.ETIMEDOUT, sentence)
    return ObjectStoreError(errno.EIO, sentence)
