"""The rules of the URL of data or weights that are fetched before a job starts, and of the address
of the server that has them.
"""

from __future__ import annotations

import re
from typing import Final

URL: Final = r"^[A-Za-z][-+.A-Za-z0-9]*://[^\x00-\x20\x7f]+$"
"""So wide that what is wrong is said by the rules, which do not repeat credentials."""
OBJECT_STORES: Final = ("s3", "gs", "az")
SCHEMES: Final = (*OBJECT_STORES, "http", "https", "hf")

_CREDENTIALS = re.compile("[^/]*//[^/?#]*@")
# `@` before a slash is a revision of hf://, which is never in the first part
_HUB_CREDENTIALS = re.compile("hf://[^/?#]*@")
_BUCKET = re.compile(r"(s3|gs|az)://[a-z0-9][-a-z0-9._]{1,220}[a-z0-9](/.*)?")
_WEB = re.compile(r"https?://([A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/.+")
_REVISION = r"(@(?P<revision>refs/(pr/[0-9]+|convert/[\w.-]+)|[^/@]+))?"
HUB = re.compile(
    r"hf://((?P<kind>datasets|models)/)?(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)"
    rf"{_REVISION}(/(?P<path>.*))?"
)
"""`hf://[datasets/]OWNER/NAME[@REVISION][/PATH]`."""
_SERVER = re.compile(
    r"https?://([A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[-A-Za-z0-9._~]+)*/?"
)


def find_problem(url: str) -> str:
    """What is wrong with the URL of data or weights, without repeating it; empty if nothing is."""
    scheme = url.partition("://")[0]
    if (_HUB_CREDENTIALS if scheme == "hf" else _CREDENTIALS).match(url):
        return (
            "must not contain credentials, since many people can read a manifest: put them in a "
            "Secret and name it with `secret`"
        )
    if "?" in url or "#" in url:
        return (
            "must not contain a query or a fragment: remove what begins with `?` or `#`, also from "
            "the names of files"
        )
    if "://" not in url or scheme not in SCHEMES:
        return f"must start with {', '.join(f'{one}://' for one in SCHEMES)}"
    path = url.partition("://")[2].partition("/")[2].rstrip("/")
    if path and any(part in {"", ".", ".."} for part in path.split("/")):
        return "must not have `.`, `..` or nothing between two slashes of its path"
    if scheme in OBJECT_STORES and _BUCKET.fullmatch(url) is None:
        return f"must be {scheme}://BUCKET or {scheme}://BUCKET/NAME, the bucket in lower case"
    if scheme in ("http", "https") and (_WEB.fullmatch(url) is None or url.endswith("/")):
        return f"must be {scheme}://HOST/PATH, where PATH ends with the name of a file"
    if scheme == "hf" and HUB.fullmatch(url) is None:
        return "must be hf://OWNER/NAME[@REVISION][/PATH], or hf://datasets/OWNER/NAME…"
    return ""


def find_server_problem(endpoint: str) -> str:
    """What is wrong with the address of a server, without repeating it; empty if nothing is."""
    if _CREDENTIALS.match(endpoint):
        return "must not contain credentials: put them in a Secret and name it with `secret`"
    if _SERVER.fullmatch(endpoint) is None:
        return "must be http://HOST or https://HOST, with or without a port"
    return ""


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
