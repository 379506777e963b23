"""What every section of a file is built of.

Field rules: camelCase in the file, snake_case in Python; a description opens with the field's name;
seconds are integers with the unit in the name; enums stand where a boolean might grow; every list
is bounded.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

Seconds = Annotated[int, Field(ge=0, le=31_536_000)]
PositiveSeconds = Annotated[int, Field(ge=1, le=31_536_000)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Name = Annotated[str, Field(min_length=1, max_length=253)]


class ConfigModel(BaseModel):
    """A strict, immutable section of a file: unknown keys are errors, `"3"` is no number, names are
    camelCase outside.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        defer_build=True,
    )


class Nodes(ConfigModel):
    """How many nodes the job may have; elastic when `min` is less than `max`."""

    min: Annotated[
        int,
        Field(ge=1, le=4096, description="min nodes needed to start and to go on after a loss."),
    ]
    max: Annotated[int, Field(ge=1, le=4096, description="max nodes that the job will use.")]

    @model_validator(mode="after")
    def _ordered(self) -> Nodes:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self
