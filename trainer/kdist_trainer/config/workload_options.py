"""The options of the shipped workloads, below `spec.train.options`. They are here and not with the
workloads because the command line, which has no torch, checks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import BaseModel, Field, ValidationError, model_validator

from kdist_trainer.config.base import ConfigModel


class DigitsOptions(ConfigModel):
    """Options of the workload `digits`."""

    width: int = Field(
        32,
        ge=1,
        le=4096,
        description="width: channels of the first convolution; the second has twice as many.",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout before the last layer.")


class GptOptions(ConfigModel):
    """Options of the workload `gpt`."""

    layers: int = Field(2, ge=1, le=1024, description="layers of attention and feed-forward.")
    width: int = Field(
        128, ge=8, le=65_536, description="width of the residual stream; a multiple of heads."
    )
    heads: int = Field(4, ge=1, le=1024, description="heads of each attention.")
    block: int = Field(
        128,
        ge=2,
        le=65_536,
        description="block: bytes that the model sees at once, and the length of a sample.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout in each layer.")
    corpus_bytes: int = Field(
        4 * 2**20, ge=1024, le=2**40, description="corpusBytes of source text to use at most."
    )

    @model_validator(mode="after")
    def _divisible(self) -> GptOptions:
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads})")
        return self


OPTIONS: Final[dict[str, type[ConfigModel]]] = {"digits": DigitsOptions, "gpt": GptOptions}
"""The options of each shipped workload."""


def names_of(model: type[BaseModel]) -> list[str]:
    """The options of a workload as job.yaml writes them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def explain(model: type[BaseModel], error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield the field of each wrong option, and what is wrong with it."""
    for each in error.errors(include_url=False):
        words = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden" and len(each["loc"]) == 1:
            words = f"the workload has no such option, only {', '.join(names_of(model)) or 'none'}"
        yield ".".join(["train.options", *map(str, each["loc"])]), words
