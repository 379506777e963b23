"""The model of `spec.train.init`: where pretrained weights come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from kdist_trainer.config.source import UrlSource
from kdist_trainer.config.violations import Violation, refuse

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

    @model_validator(mode="after")
    def _check(self) -> Init:
        refuse(self._violations())
        return self

    def _violations(self) -> Iterator[Violation]:
        if (self.path is None) == (self.url is None):
            yield Violation(ONE_SOURCE, "", ("path", "url"))
        else:
            yield from self.check_source()

    @property
    def source(self) -> str:
        """The path or the URL, as it is in job.yaml."""
        return self.path or self.url or ""
