"""The rules of the URL of a bucket with checkpoints, and of the address of the server that has it.

The pattern is written so that Python and the API server read it alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from kdist.spec.violations import Violation
from kdist_trainer.config.source_url import find_secret, find_server_problem

BUCKET: Final = (
    "^(s3|gs|az)://[a-z0-9][-a-z0-9._]{1,220}[a-z0-9](/[-A-Za-z0-9_=+@][-A-Za-z0-9._=+@]*)*/?$"
)
NO_BUCKET: Final = (
    "must be s3://BUCKET, gs://BUCKET or az://CONTAINER, in lower case, with or without /PREFIX, "
    "whose parts are letters, digits, `-`, `_` and `.`, neither empty nor beginning with `.`"
)


def scheme_of(url: str) -> str:
    """The scheme of a URL; empty if it has none."""
    return url.partition("://")[0] if "://" in url else ""


def port_of(endpoint: str) -> int:
    """The port of a server's address."""
    address = urlsplit(endpoint)
    return address.port or (80 if address.scheme == "http" else 443)


def check_url(url: str) -> Iterator[Violation]:
    """Check the URL of a bucket."""
    problem = find_secret(url) or ("" if re.search(BUCKET, url) else NO_BUCKET)
    if problem:
        yield Violation(problem, "url", ("url",))


def check_endpoint(endpoint: str) -> Iterator[Violation]:
    """Check the address of a server."""
    if problem := find_server_problem(endpoint):
        yield Violation(problem, "endpoint", ("endpoint",))
