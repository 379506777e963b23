"""The rules of the URL of data or weights that are fetched before a job starts, and of the address
of a server.

The patterns of names in capitals are written so that Python and the API server read them alike.
"""

from __future__ import annotations

import re
from typing import Final

URL: Final = r"^[A-Za-z][-+.A-Za-z0-9]*://[^\x00-\x20\x7f]+$"
SERVER_URL: Final = "^[A-Za-z][-+.A-Za-z0-9]*://[!-~]+$"
"""So wide that what is wrong is said by the rules, which do not repeat credentials."""
OBJECT_STORES: Final = ("s3", "gs", "az")
SCHEMES: Final = (*OBJECT_STORES, "http", "https", "hf")
CREDENTIALS: Final = "^[^/]*//[^/?#]*@"
QUERY: Final = "[?#]"
SERVER: Final = (
    r"^https?://([A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[-A-Za-z0-9._~]+)*/?$"
)
HAS_CREDENTIALS: Final = (
    "must not contain credentials, since many people can read a manifest: put them in a Secret and "
    "name it with `secret`"
)
HAS_QUERY: Final = "must not contain a query or a fragment: remove what begins with `?` or `#`"
NO_SCHEME: Final = f"must start with {', '.join(f'{one}://' for one in SCHEMES)}"
NO_SERVER: Final = "must be http://HOST or https://HOST, with or without a port"

_BUCKET = re.compile(r"(s3|gs|az)://[a-z0-9][-a-z0-9._]{1,220}[a-z0-9](/.*)?")
_WEB = re.compile(r"https?://([A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/.+")
_PORT = re.compile(r":([0-9]+)$")
_MOST_PORT = 65_535
_REVISION = r"(@(?P<revision>refs/(pr/[0-9]+|convert/[\w.-]+)|[^/@]+))?"
HUB = re.compile(
    r"hf://((?P<kind>datasets|models)/)?(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)"
    rf"{_REVISION}(/(?P<path>.*))?"
)
"""`hf://[datasets/]OWNER/NAME[@REVISION][/PATH]`."""


def find_problem(url: str) -> str:
    """What is wrong with the URL of data or weights, without repeating it; empty if nothing is."""
    scheme, _, rest = url.partition("://")
    if problem := find_secret(url):
        return problem
    if "://" not in url or scheme not in SCHEMES:
        return NO_SCHEME
    path = rest.partition("/")[2].rstrip("/")
    if path and any(part in {"", ".", ".."} for part in path.split("/")):
        return "must not have `.`, `..` or nothing between two slashes of its path"
    if scheme in OBJECT_STORES and _BUCKET.fullmatch(url) is None:
        return f"must be {scheme}://BUCKET or {scheme}://BUCKET/NAME, the bucket in lower case"
    if scheme in ("http", "https"):
        if _WEB.fullmatch(url) is None or url.endswith("/"):
            return f"must be {scheme}://HOST/PATH, where PATH ends with the name of a file"
        return _find_port_problem(url)
    if scheme == "hf" and HUB.fullmatch(url) is None:
        return "must be hf://OWNER/NAME[@REVISION][/PATH], or hf://datasets/OWNER/NAME…"
    return ""


def find_server_problem(endpoint: str) -> str:
    """What is wrong with the address of a server, without repeating it; empty if nothing is."""
    if problem := find_secret(endpoint):
        return problem
    if re.search(SERVER, endpoint) is None:
        return NO_SERVER
    return _find_port_problem(endpoint)


def find_secret(url: str) -> str:
    """Which part of a URL may be secret, in words; empty if none is."""
    if re.search(CREDENTIALS, url):
        return HAS_CREDENTIALS
    return HAS_QUERY if re.search(QUERY, url) else ""


def _find_port_problem(url: str) -> str:
    port = _PORT.search(url.partition("://")[2].partition("/")[0])
    if port is None or 0 < int(port[1]) <= _MOST_PORT:
        return ""
    return f"must have a port from 1 to {_MOST_PORT}, found {port[1]}"


def without_secrets(url: str) -> str:
    """The URL as it may be shown: without a user, a password, a query and a fragment."""
    return re.split("[?#]", re.sub("^([^/?#]*//)[^/?#]*@", r"\1***@", url), maxsplit=1)[0]


def base_name(url: str) -> str:
    """The last part of the path of a URL, which is the name of the file if it names one file; empty
    for a whole repository of hf://.
    """
    if found := HUB.fullmatch(url):
        return (found["path"] or "").rstrip("/").rpartition("/")[2]
    return url.partition("://")[2].rstrip("/").rpartition("/")[2]
