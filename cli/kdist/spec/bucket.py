"""The rules of the URL of a bucket with checkpoints, and of the address of the server that has it.

The patterns are written so that Python and the API server read them alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from kdist.spec.violations import Violation

# so wide that what is wrong is said by the rules below, which do not repeat credentials
BUCKET_URL: Final = r"^[A-Za-z][-+.A-Za-z0-9]*://[^\x00-\x20\x7f]+$"
SERVER_URL: Final = "^[A-Za-z][-+.A-Za-z0-9]*://[!-~]+$"
CREDENTIALS: Final = "^[^/]*//[^/?#]*@"
QUERY: Final = "[?#]"
BUCKET: Final = (
    "^(s3|gs|az)://[a-z0-9][-a-z0-9._]{1,220}[a-z0-9](/[-A-Za-z0-9_=+@][-A-Za-z0-9._=+@]*)*/?$"
)
ENDPOINT: Final = (
    r"^https?://([A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[-A-Za-z0-9._~]+)*/?$"
)
HAS_CREDENTIALS: Final = (
    "must not contain credentials, since many people can read a manifest: put them in a Secret and "
    "name it with `secret`"
)
HAS_QUERY: Final = "must not contain a query or a fragment: remove what begins with `?` or `#`"
NO_BUCKET: Final = (
    "must be s3://BUCKET, gs://BUCKET or az://CONTAINER, in lower case, with or without /PREFIX, "
    "whose parts are letters, digits, `-`, `_` and `.`, neither empty nor beginning with `.`"
)
NO_ENDPOINT: Final = "must be http://HOST or https://HOST, with or without a port"
_MOST_PORT: Final = 65_535


def scheme_of(url: str) -> str:
    """The scheme of a URL; empty if it has none."""
    return url.partition("://")[0] if "://" in url else ""


def port_of(endpoint: str) -> int:
    """The port of a server's address."""
    address = urlsplit(endpoint)
    return address.port or (80 if address.scheme == "http" else 443)


def check_url(url: str) -> Iterator[Violation]:
    """Check the URL of a bucket."""
    if problem := _find_problem(url, BUCKET, NO_BUCKET):
        yield Violation(problem, "url", ("url",))


def check_endpoint(endpoint: str) -> Iterator[Violation]:
    """Check the address of a server."""
    problem = _find_problem(endpoint, ENDPOINT, NO_ENDPOINT)
    port = re.search(":([0-9]+)(/|$)", endpoint.partition("://")[2].rpartition("]")[2])
    if not problem and port and not 0 < int(port[1]) <= _MOST_PORT:
        problem = f"must have a port from 1 to {_MOST_PORT}, found {port[1]}"
    if problem:
        yield Violation(problem, "endpoint", ("endpoint",))


def _find_problem(text: str, pattern: str, otherwise: str) -> str:
    if re.search(CREDENTIALS, text):
        return HAS_CREDENTIALS
    if re.search(QUERY, text):
        return HAS_QUERY
    return "" if re.search(pattern, text) else otherwise
