"""Where data, weights and checkpoints come from: the rules for their URLs, the fields of a section
of job.yaml that names one (`UrlSource`), the model of `spec.train.init` (`Init`), and the
environment variables that pass endpoints, regions and credentials to a process.

The patterns of fields are written so that Python and the API server read them alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field

from kdist_trainer.config.base import (
    DIGEST,
    LABEL,
    OBJECT_NAME,
    Bytes,
    CheckedModel,
    Violation,
)
from kdist_trainer.formats import OBJECT_STORES

URL: Final = r"^[A-Za-z][-+.A-Za-z0-9]*://[^\x00-\x20\x7f]+$"
SERVER_URL: Final = "^[A-Za-z][-+.A-Za-z0-9]*://[!-~]+$"
"""So wide that what is wrong is said by the rules, which do not repeat credentials."""
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

_BUCKET = re.compile(rf"({'|'.join(OBJECT_STORES)})://[a-z0-9][-a-z0-9._]{{1,220}}[a-z0-9](/.*)?")
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


DEFAULT_SIZE: Final = "10Gi"
NEEDS_URL: Final = "belongs to what is fetched: it needs url"
NO_ENDPOINT_HERE: Final = "is for s3://, az:// and hf://"
S3_ONLY: Final = "is for s3:// only"
OF_URL: Final = ("endpoint", "region", "secret", "size", "sha256")
"""Fields that say how a URL is fetched."""


class UrlSource(CheckedModel):
    """A URL, and how it is fetched."""

    url: Annotated[str, Field(pattern=URL, max_length=2048)] | None = Field(
        None,
        description=(
            "URL to fetch on each node before the training starts: s3://BUCKET/NAME (also gs:// "
            "and az://), a file of https://, hf://OWNER/MODEL@REVISION or "
            "hf://datasets/OWNER/NAME@REVISION."
        ),
    )
    endpoint: Annotated[str, Field(pattern=SERVER_URL, max_length=1024)] | None = Field(
        None,
        description=(
            "Address of the server, if url is on another one than that of the cloud or of Hugging "
            "Face, such as https://minio.example.com:9000."
        ),
    )
    region: Annotated[str, Field(pattern=LABEL, max_length=63)] | None = Field(
        None, description="Region of an s3:// bucket, such as eu-central-1."
    )
    secret: Annotated[str, Field(pattern=OBJECT_NAME, max_length=253)] | None = Field(
        None,
        description=(
            "Secret on the cluster whose keys are the variables with the credentials: those of the "
            "object store, HTTP_AUTHORIZATION, or HF_TOKEN."
        ),
    )
    size: Bytes | None = Field(
        None,
        description=(
            "Most bytes that are fetched from url, on each node, such as 200Gi; "
            f"{DEFAULT_SIZE} unless given."
        ),
    )
    sha256: Annotated[str, Field(pattern=DIGEST, max_length=64)] | None = Field(
        None,
        description=(
            "SHA-256 of the file, as 64 hexadecimal digits; of several files, that of SHA256SUMS "
            "among them, which names the digests of all."
        ),
    )

    def _violations(self) -> Iterator[Violation]:
        if self.url is None:
            for name in OF_URL:
                if getattr(self, name) is not None:
                    yield Violation(NEEDS_URL, name, ("url", name))
            return
        scheme = self.url.partition("://")[0]
        if problem := find_problem(self.url):
            yield Violation(problem, "url", ("url",))
        if self.endpoint is not None:
            if problem := find_server_problem(self.endpoint):
                yield Violation(problem, "endpoint", ("endpoint",))
            if scheme in ("gs", "http", "https"):
                yield Violation(NO_ENDPOINT_HERE, "endpoint", ("url", "endpoint"))
        if self.region is not None and scheme != "s3":
            yield Violation(S3_ONLY, "region", ("url", "region"))


AUTHORIZATION: Final = "HTTP_AUTHORIZATION"
"""Variable with the value of the header `Authorization`, for files of http:// and https://."""
HUB_TOKEN: Final = "HF_TOKEN"  # noqa: S105 - its name
"""Variable with the token of hf://."""
CREDENTIAL_VARIABLES: Final[dict[str, tuple[str, ...]]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY"),
    "http": (AUTHORIZATION,),
    "https": (AUTHORIZATION,),
    "hf": (HUB_TOKEN,),
}
"""By the scheme of a URL, the variables that a Secret with credentials may have as its keys."""
_PUBLIC: Final = "AZURE_STORAGE_ACCOUNT_NAME"  # it is part of every address
SECRET_VARIABLES: Final[dict[str, tuple[str, ...]]] = {
    scheme: tuple(name for name in names if name != _PUBLIC)
    for scheme, names in CREDENTIAL_VARIABLES.items()
}
"""Those of them whose values are in no log that is kept."""
CHECKPOINTS_ENDPOINT: Final = "KDIST_CHECKPOINTS_ENDPOINT"
"""Variable with the address of the server, if it is not that of the store's owner."""
CHECKPOINTS_REGION: Final = "KDIST_CHECKPOINTS_REGION"
"""Variable with the region of an s3:// bucket."""


NOT_FETCHED: Final = (
    "{} was not fetched: run `python -m kdist_trainer.fetch` first, and start the agent with "
    "--init and the folder `files` of what it has fetched"
)
ONE_SOURCE: Final = "needs exactly one of path and url"


class Init(UrlSource):
    """Pretrained weights to start from; the run's own checkpoints take precedence."""

    path: Annotated[str, Field(pattern=r"^/[^\x00-\x1f]*$", max_length=4096)] | None = Field(
        None,
        description=(
            "Path of a safetensors file or a folder of checkpoints, as seen by the pods: "
            "below a mountPath of data."
        ),
    )
    strict: Literal["on", "off"] = Field(
        "on",
        description=(
            "on fails if weights are missing or have another shape; off leaves these "
            "as the model initialized them."
        ),
    )

    def _violations(self) -> Iterator[Violation]:
        if (self.path is None) == (self.url is None):
            yield Violation(ONE_SOURCE, "", ("path", "url"))
        else:
            yield from super()._violations()

    @property
    def source(self) -> str:
        """The path or the URL, as it is in job.yaml."""
        return self.path or self.url or ""
