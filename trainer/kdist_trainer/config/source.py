"""The fields of a section of job.yaml that names data or weights by URL, and what fetches them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import Field

from kdist_trainer.config import source_url
from kdist_trainer.config.base import DIGEST, LABEL, OBJECT_NAME, Bytes, ConfigModel
from kdist_trainer.config.violations import Violation

DEFAULT_SIZE: Final = "10Gi"
NEEDS_URL: Final = "belongs to what is fetched: it needs url"
NO_ENDPOINT_HERE: Final = "is for s3://, az:// and hf://"
S3_ONLY: Final = "is for s3:// only"
OF_URL: Final = ("endpoint", "region", "secret", "size", "sha256")
"""Fields that say how a URL is fetched."""


class UrlSource(ConfigModel):
    """A URL, and how it is fetched."""

    url: Annotated[str, Field(pattern=source_url.URL, max_length=2048)] | None = Field(
        None,
        description=(
            "URL to fetch on each node before the training starts: s3://BUCKET/NAME (also gs:// "
            "and az://), a file of https://, hf://OWNER/MODEL@REVISION or "
            "hf://datasets/OWNER/NAME@REVISION."
        ),
    )
    endpoint: Annotated[str, Field(pattern=source_url.SERVER_URL, max_length=1024)] | None = Field(
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
            "Most bytes that are fetched from url, on each node, such as 200Gi; 10Gi unless given."
        ),
    )
    sha256: Annotated[str, Field(pattern=DIGEST, max_length=64)] | None = Field(
        None,
        description=(
            "SHA-256 of the file, as 64 hexadecimal digits; of several files, that of SHA256SUMS "
            "among them, which names the digests of all."
        ),
    )

    def check_source(self) -> Iterator[Violation]:
        """The broken rules of these fields."""
        if self.url is None:
            for name in OF_URL:
                if getattr(self, name) is not None:
                    yield Violation(NEEDS_URL, name, ("url", name))
            return
        scheme = self.url.partition("://")[0]
        if problem := source_url.find_problem(self.url):
            yield Violation(problem, "url", ("url",))
        if self.endpoint is not None:
            if problem := source_url.find_server_problem(self.endpoint):
                yield Violation(problem, "endpoint", ("endpoint",))
            if scheme in ("gs", "http", "https"):
                yield Violation(NO_ENDPOINT_HERE, "endpoint", ("url", "endpoint"))
        if self.region is not None and scheme != "s3":
            yield Violation(S3_ONLY, "region", ("url", "region"))
