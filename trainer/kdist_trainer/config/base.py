"""The base class and common types of all sections of a job file, and the error for broken rules.

Field rules: camelCase in the file, snake_case in Python; a description is a sentence; seconds are
integers with the unit in the name; enums are used where a boolean might grow; every list is
bounded.

`Violation` is one broken rule; `refuse` raises all of them as one pydantic error, each with its
field.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import ModuleType
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kdist_trainer.formats import MAX_NODES

Seconds = Annotated[int, Field(ge=0, le=31_536_000)]
PositiveSeconds = Annotated[int, Field(ge=1, le=31_536_000)]
Count = Annotated[int, Field(ge=1, le=2**53)]
NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]
Name = Annotated[str, Field(min_length=1, max_length=253)]

_UNITS = {
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
QUANTITY = r"^[1-9][0-9]{0,14}(Ki|Mi|Gi|Ti|k|M|G|T)$"

LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
OBJECT_NAME = rf"{LABEL[:-1]}(\.{LABEL[1:-1]})*$"
"""RFC 1123: a label, and a subdomain."""
DIGEST = r"^[0-9a-f]{64}$"

NO_NUL = r"^[^\x00]*$"
Argument = Annotated[str, Field(max_length=32_768, pattern=NO_NUL)]
"""An argument of a program, or the value of a variable."""

Bytes = Annotated[str, Field(max_length=32, pattern=QUANTITY)]
"""A number of bytes as Kubernetes writes quantities: `64Mi`, `1G`."""


def count_bytes(quantity: str) -> int:
    """Convert a `Bytes` to a number of bytes. Raises `ValueError` for anything else."""
    if re.match(QUANTITY, quantity) is None:
        raise ValueError(f"{quantity!r} is not a number of bytes")
    number = quantity.rstrip("kKMGTi")
    return int(number) * _UNITS[quantity[len(number) :]]


_PLUGIN_LOADER = "pydantic.plugin._loader"
"""The private module whose `get_plugins` pydantic calls when it builds a model. If pydantic renames
it, plugins are loaded again, and a test fails.
"""
_plugins_lock = RLock()


@contextmanager
def _no_plugins() -> Iterator[None]:
    """Have pydantic build models without its plugins, and without `importlib.metadata`, which it
    imports only to find them. Other code loads plugins as usual.
    """
    stand_in = ModuleType(_PLUGIN_LOADER)
    stand_in.__dict__["get_plugins"] = tuple
    with _plugins_lock:
        before = sys.modules.get(_PLUGIN_LOADER)
        sys.modules[_PLUGIN_LOADER] = stand_in
        try:
            yield
        finally:
            if before is None:
                del sys.modules[_PLUGIN_LOADER]
            else:
                sys.modules[_PLUGIN_LOADER] = before


class ConfigModel(BaseModel):
    """A strict, immutable section of a file: unknown keys are errors, `"3"` is not a number, and
    names are camelCase in the file.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        defer_build=True,
    )

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Build the validator when it is first used. Without plugins: to find them, pydantic reads
        the metadata of every installed distribution.
        """
        with _no_plugins():
            return super().model_rebuild(**options)


class Nodes(ConfigModel):
    """Number of nodes; the job is elastic if `min` is less than `max`."""

    min: NodeCount = Field(
        description="Minimum number of nodes to start, and to continue after a node is lost."
    )
    max: NodeCount = Field(description="Maximum number of nodes.")
    standby: Annotated[
        int,
        Field(
            ge=0,
            le=64,
            description=(
                "Nodes beyond the maximum that stand by, their ranks started, to take the place of "
                "a node that is lost."
            ),
        ),
    ] = 0

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, int]:
        """Leave out `standby` if it is 0: running agents of an earlier version, which read
        the nodes again when a job is scaled, do not know it.
        """
        document: dict[str, int] = handler(self)
        return {name: value for name, value in document.items() if name != "standby" or value}

    @model_validator(mode="after")
    def _ordered(self) -> Nodes:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


RULE = "job_rule"  # the type of the pydantic error that carries violations


def later(default: Any, **options: Any) -> Any:
    """A `Field` that earlier trainers do not know: it is written unless it is its default."""
    return Field(default, exclude_if=lambda value: value == default, **options)


class Violation(NamedTuple):
    """One broken rule. Fields are dotted names relative to the model that the rule belongs to."""

    message: str
    at: str  # the wrong field; empty for the model itself
    fields_read: tuple[str, ...]  # the fields that the rule has read
    suggestion: str = ""


def refuse(violations: Iterable[Violation]) -> None:
    """Raise a `PydanticCustomError` with all violations, if there are any."""
    found = [tuple(violation) for violation in violations]
    if found:
        text = "; ".join(f"{each[1]} {each[0]}".lstrip() for each in found)
        raise PydanticCustomError(RULE, "{text}", {"text": text, "violations": found})


class CheckedModel(ConfigModel):
    """A section with rules across its fields."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(self._violations())
        return self

    @abstractmethod
    def _violations(self) -> Iterator[Violation]:
        """The broken rules."""
