"""The section `spec.data[]` of job.yaml: a data set on a volume, at a URL, or on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import Field, model_validator

from kdist.spec.bucket import check_endpoint
from kdist.spec.models import Digest, FolderPath, Label, MountPath, ObjectName, ServerUrl
from kdist.spec.violations import Violation, check_mount, refuse
from kdist_trainer.config import QUANTITY, ConfigModel
from kdist_trainer.config.source_url import URL, find_problem

Bytes = Annotated[str, Field(max_length=32, pattern=QUANTITY)]
SourceUrl = Annotated[str, Field(max_length=2048, pattern=URL)]

NO_SOURCE: Final = "needs a claim, a url, or a path on this machine"
TWO_SOURCES: Final = "excludes claim; keep one"
NEEDS_URL: Final = "belongs to what is fetched: it needs url"
NO_ENDPOINT_HERE: Final = "is for s3://, az:// and hf://"
S3_ONLY: Final = "is for s3:// only"
DEFAULT_SIZE: Final = "10Gi"
OF_URL: Final = ("endpoint", "region", "secret", "sha256", "size")
"""Fields that say how a URL is fetched."""


class Data(ConfigModel):
    """One data set that every rank can read."""

    claim: ObjectName | None = Field(
        None, description="PersistentVolumeClaim with the data on a cluster."
    )
    url: SourceUrl | None = Field(
        None,
        description=(
            "URL of the data, which each node fetches before the training starts: s3://BUCKET/NAME "
            "(also gs:// and az://), a file of https://, or hf://datasets/OWNER/NAME@REVISION."
        ),
    )
    path: FolderPath | None = Field(
        None, description="Path of the same data on this machine, for `kdist run`."
    )
    mount_path: MountPath = Field(description="Path at which the data is mounted on a cluster.")
    endpoint: ServerUrl | None = Field(
        None,
        description=(
            "Address of the server, if url is on another one than that of the cloud or of Hugging "
            "Face, such as https://minio.example.com:9000."
        ),
    )
    region: Label | None = Field(
        None, description="Region of an s3:// bucket, such as eu-central-1."
    )
    secret: ObjectName | None = Field(
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
    sha256: Digest | None = Field(
        None,
        description=(
            "SHA-256 of the file, as 64 hexadecimal digits; of several files, that of SHA256SUMS "
            "among them, which names the digests of all."
        ),
    )

    @model_validator(mode="after")
    def _has_a_source(self) -> Data:
        refuse(self._violations())
        return self

    def _violations(self) -> Iterator[Violation]:
        if self.claim is None and self.path is None and self.url is None:
            yield Violation(NO_SOURCE, "", ("claim", "url", "path"))
        if self.claim is not None and self.url is not None:
            yield Violation(TWO_SOURCES, "url", ("claim", "url"))
        yield from check_mount(self.mount_path)
        if self.url is None:
            for name in OF_URL:
                if getattr(self, name) is not None:
                    yield Violation(NEEDS_URL, name, ("url", name))
            return
        if problem := find_problem(self.url):
            yield Violation(problem, "url", ("url",))
        scheme = self.url.partition("://")[0]
        if self.endpoint is not None:
            yield from check_endpoint(self.endpoint)
            if scheme in ("gs", "http", "https"):
                yield Violation(NO_ENDPOINT_HERE, "endpoint", ("url", "endpoint"))
        if self.region is not None and scheme != "s3":
            yield Violation(S3_ONLY, "region", ("url", "region"))
