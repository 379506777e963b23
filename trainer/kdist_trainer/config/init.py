"""The model of `spec.train.init`: where pretrained weights come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kdist_trainer.config import source_url
from kdist_trainer.config.base import Bytes, ConfigModel

_OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"

NOT_FETCHED = (
    "{} was not fetched: run `python -m kdist_trainer.fetch` first, and start the agent with "
    "--init and the folder `files` of what it has fetched"
)


class Init(ConfigModel):
    """Pretrained weights to start from; the run's own checkpoints take precedence."""

    path: Annotated[str, Field(pattern=r"^/[^\x00-\x1f]*$", max_length=4096)] | None = Field(
        None,
        description=(
            "Path of a safetensors file or a folder of checkpoints, as seen by the pods: "
            "below a mountPath of data."
        ),
    )
    url: Annotated[str, Field(pattern=source_url.URL, max_length=2048)] | None = Field(
        None,
        description=(
            "URL of weights to fetch before the training starts: hf://OWNER/NAME@REVISION, "
            "s3://BUCKET/NAME (also gs:// and az://), or https:// of a safetensors file or of the "
            "index of several."
        ),
    )
    endpoint: Annotated[str, Field(pattern=source_url.URL, max_length=2048)] | None = Field(
        None,
        description=(
            "Address of the server, if url is on another one than that of the cloud or of Hugging "
            "Face, such as https://minio.example.com:9000."
        ),
    )
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=63)] | None = Field(
        None, description="Region of an s3:// bucket, such as eu-central-1."
    )
    secret: Annotated[str, Field(pattern=_OBJECT_NAME, max_length=253)] | None = Field(
        None,
        description=(
            "Secret on the cluster whose keys are the variables with the credentials: those of the "
            "object store, HTTP_AUTHORIZATION, or HF_TOKEN."
        ),
    )
    size: Bytes = Field(
        "10Gi", description="Most bytes that are fetched from url, on each node, such as 30Gi."
    )
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", max_length=64)] | None = Field(
        None,
        description=(
            "SHA-256 of the file, as 64 hexadecimal digits; of several files, that of SHA256SUMS "
            "among them, which names the digests of all."
        ),
    )
    strict: Literal["on", "off"] = Field(
        "on",
        description=(
            "on fails if weights are missing or have another shape; off leaves these "
            "as the model initialized them."
        ),
    )

    @model_validator(mode="after")
    def _one_source(self) -> Init:
        if (self.path is None) == (self.url is None):
            raise ValueError("needs exactly one of path and url")
        return self

    @model_validator(mode="after")
    def _valid_source(self) -> Init:
        if self.url is None:
            for name in ("endpoint", "region", "secret", "sha256"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to what is fetched: it needs url")
            return self
        scheme = self.url.partition("://")[0]
        if problem := source_url.find_problem(self.url):
            raise ValueError(f"url {problem}")
        if self.endpoint is not None:
            if problem := source_url.find_server_problem(self.endpoint):
                raise ValueError(f"endpoint {problem}")
            if scheme in ("gs", "http", "https"):
                raise ValueError("endpoint is for s3://, az:// and hf://")
        if self.region is not None and scheme != "s3":
            raise ValueError("region is for s3:// only")
        return self

    @property
    def source(self) -> str:
        """The path or the URL, as it is in job.yaml."""
        return self.path or self.url or ""
