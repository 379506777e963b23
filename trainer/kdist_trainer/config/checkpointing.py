"""The models of `spec.train.checkpoint`: when and how the state of a training is saved."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from kdist_trainer.config.base import ConfigModel, Count, PositiveSeconds


def _only_true(value: Any) -> Any:
    """1, which equals True, is none of it."""
    if value is not None and type(value) is not bool:
        raise ValueError("must be true")
    return value


class Every(ConfigModel):
    """The interval between two saves: one that the run finds itself, in seconds, in steps,
    or whichever of steps and one of the others comes first.
    """

    auto: Annotated[Literal[True] | None, BeforeValidator(_only_true)] = Field(
        None,
        description=(
            "The interval that loses the least training time: it follows from what a save costs "
            "and how far apart the failures are that go back to a checkpoint, and is between 60 s "
            "(10 s after the first of them) and an hour. `kdist status` shows it. It excludes "
            "seconds."
        ),
    )
    seconds: PositiveSeconds | None = Field(None, description="Seconds between two checkpoints.")
    steps: Count | None = Field(None, description="Steps between two checkpoints.")

    @classmethod
    def of(cls, seconds: int | Literal["auto"]) -> Every:
        """The interval that a script names."""
        return cls(auto=True) if seconds == "auto" else cls(seconds=seconds)

    @model_validator(mode="after")
    def _given(self) -> Every:
        if self.auto is None and self.seconds is None and self.steps is None:
            raise ValueError("needs auto, seconds, steps, or steps with one of the others")
        if self.auto is not None and self.seconds is not None:
            raise ValueError("auto and seconds exclude each other; keep one")
        return self

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `auto` if it is not given: earlier trainers do not know it."""
        document: dict[str, Any] = handler(self)
        return {name: value for name, value in document.items() if name != "auto" or value}


def _every_from_word(value: Any) -> Any:
    """`every: auto` means `{auto: true}`."""
    return {"auto": True} if value == "auto" else value


class Checkpointing(ConfigModel):
    """When and how the state of the training is saved."""

    every: Annotated[Every, BeforeValidator(_every_from_word)] = Field(
        Every(auto=True),
        description=(
            "Interval between checkpoints: {auto: true}, or auto for short, the one that loses the "
            "least training time; in seconds; in steps; or steps with one of the others."
        ),
    )
    mode: Literal["async", "blocking"] = Field(
        "async",
        description="async writes in the background; blocking pauses training for the write.",
    )
    keep: int = Field(
        3,
        ge=1,
        le=1000,
        description=(
            "Number of committed checkpoints to keep. If the interval is auto, these are the "
            "newest one and older ones that are at least five minutes apart."
        ),
    )
    load: Literal["each", "broadcast"] = Field(
        "each",
        description=(
            "each: every rank reads its own part; broadcast: rank 0 reads and sends it to "
            "the others."
        ),
    )

    @property
    def seconds_apart(self) -> float:
        """Seconds that lie between the checkpoints that are kept besides the newest one: a run
        that saves every few seconds keeps more than its last minute.
        """
        return 300.0 if self.every.auto else 0.0

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an interval that nobody has given: each trainer has its own default, and an
        earlier one knows no `auto`.
        """
        document: dict[str, Any] = handler(self)
        given = "every" in self.model_fields_set
        return {name: value for name, value in document.items() if name != "every" or given}
